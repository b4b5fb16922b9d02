"""What ptxas 12.8, which Triton 3.6 brings, does to addresses of tiles in shared memory; and a look for it in machine code.

A product of Hopper's matrix unit names a tile by 64 bits: its address in the low half, its format (length of rows, swizzle) in the high
one. Where one place in shared memory is named in two formats, one after the other, each by additions of its own,

    or.b64 a, place, 0x4000004000010000;  add.s64 b, place, 0x4000004000010080;  ..  add.s64 c, place, 0x8000002000010002;

ptxas 12.8 may make the last addition of neither half of `place`, but of one register that holds something else:

    UIADD3 UR25, UP0, UR16, 0x2, URZ;  UIADD3.X UR24, UR16, -0x7fffffe0, URZ, UP0, !UPT         (UR16: last written for another purpose)

The product then reads another place: gradients were wrong by up to 1e20, or an access was illegal. That is -O3; -O1 reads registers that
nothing has written, -O0 is right, and so are the ptxas of CUDA 12.9 and 13.0. So `config.turned` gives tiles that share places one format.
`python tests/stages/test_lost_addresses.py` shows it, without a GPU.
"""

from __future__ import annotations

import re
from collections import defaultdict

from triton_offline import said_of

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
LOW = re.compile(r"UIADD3 UR\d+, (UP\d), (UR\d+), -?0x[0-9a-f]+, URZ")
HIGH = re.compile(r"UIADD3\.X UR\d+, (UR\d+), -?0x[0-9a-f]+, URZ, (UP\d), !UPT")
WRITTEN = re.compile(r"\S+ (UR\d+),")
NAMED = re.compile(r"(?:or\.b64|add\.s64)\s+%rd\d+, (%rd\d+), (-?\d{15,});")


def two_formats(ptx: str) -> list[str]:
    """Registers with a place in shared memory that is named in more than one format."""
    formats = defaultdict(set)
    for place, number in NAMED.findall(ptx):
        formats[place].add(int(number) >> 32)
    return [place for place, found in formats.items() if len(found) > 1]


def lost_addresses(cubin: bytes) -> list[str]:
    """Additions of 64 bits, a low and a high half, that take both from one register which nothing has written in between."""
    low: dict[str, tuple[str, str]] = {}  # carry -> the register it comes from, the instruction
    found = []
    for line in said_of(cubin, "nvdisasm", "-c").splitlines():
        if not (instruction := INSTRUCTION.match(line)):
            continue
        code = instruction[1]
        if half := LOW.match(code):
            low[half[1]] = half[2], code
        elif (half := HIGH.match(code)) and half[2] in low:
            place, first = low.pop(half[2])
            if place == half[1]:
                found.append(f"{first}; {code}")
        elif written := WRITTEN.match(code):
            low = {carry: x for carry, x in low.items() if x[0] != written[1]}
    return found
