"""cipo_jax: train and audit search agents whose next step depends on the evidence they retrieved."""
