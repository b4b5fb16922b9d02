"""States of many sequences in one pool: decode, speculative drafts with rollback, prefill with checkpoints.

kdakit.serving.torch   StatePool changed in place; on a GPU one launch a call
kdakit.serving.jax     the same calls as functions from a pool to the next one
kdakit.serving.engine  continuous batching of a model over such pools: admission, slices of prompts, drafts, a prefix cache
"""
