"""Triton without KDA: launches, their repetition, compilation ahead, streams, and how tensors lie."""
