"""The job service inside the enclave."""
