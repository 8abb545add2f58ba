"""The data holder: seals data, verifies evidence, releases keys, submits jobs. It needs no TEE and no accelerator."""
