"""`python -m dsv4_jax demo`: a text through all compressors, every stored byte checked."""
