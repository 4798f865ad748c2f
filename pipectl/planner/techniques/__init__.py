"""What stages may do besides: offload, recompute, run backwards elsewhere, or share a rank."""
