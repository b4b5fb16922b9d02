"""Training small models: data, AdamW with a cosine in both frameworks, checkpoints. What `kdakit demo` and `kdakit train` stand on."""
