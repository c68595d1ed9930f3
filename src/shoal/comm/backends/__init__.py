"""What carries collectives: torch.distributed, MPI, shared memory."""
