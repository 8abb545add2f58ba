"""The data holder: seals data, verifies evidence, releases keys, submits jobs. It works on any machine with Python."""
