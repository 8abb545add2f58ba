"""Why a stranger's machine may have the data: evidence and its verifier, keys, sealing. It computes on nothing."""
