"""`import kdakit.fla`: the same as `kdakit.enable("fla")`."""

import kdakit

kdakit.enable("fla")
