"""Training on more than the policy's own fresh samples: mixing, prefixes, replay, interleaved fine-tuning."""
