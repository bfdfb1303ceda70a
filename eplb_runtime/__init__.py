"""Expert-parallel load balancing for MoE training: the public names, nothing else."""
