"""`python -m dsv4_jax demo`: runs a text through all compressors and checks every stored byte."""
