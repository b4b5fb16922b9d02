"""The host side of a call: buffers, and the launches that fill them."""
