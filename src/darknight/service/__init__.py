"""The job service inside the enclave: it takes sealed data and keys, trains on shares, and seals the results."""
