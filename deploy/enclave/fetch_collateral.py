"""Fetch Intel's collateral for the quotes of an enclave, and put it where `darknight enclave --collateral` reads it.

    python deploy/enclave/fetch_collateral.py ENCLAVE_HOST:PORT /var/lib/darknight/collateral/collateral.json

Run it on the host, once a day. It needs no secret and no trust: Intel signed what it fetches, and every client checks
that. For the first time start the enclave with an empty file there: a quote has to be asked for to know whose
collateral it is. --save-quote keeps the quote instead, for another machine to fetch with.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import dcap_qvl

from darknight.errors import DarKnightError
from darknight.trust.durable import write_durably
from darknight.trust.evidence import Evidence
from darknight.trust.fresh import fresh_nonce
from darknight.wire.job_channel import JobChannel
from darknight.wire.jobs import ATTEST, dump, load


def quote_of(address: str) -> bytes:
    """A quote of the enclave at `address`, for a nonce of nobody's."""
    channel = JobChannel(address)
    try:
        words = load(channel.ask(ATTEST, dump({"nonce": fresh_nonce().hex()})))
    finally:
        channel.close()
    return Evidence.from_words(words.get("evidence")).quote


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch Intel's collateral for the quotes of an enclave.")
    parser.add_argument("address", help="where the enclave listens, HOST:PORT")
    parser.add_argument("file", type=Path, help="where the collateral goes; replaced in one piece")
    parser.add_argument("--save-quote", action="store_true", help="write the quote into FILE, and fetch nothing")
    options = parser.parse_args()
    try:
        quote = quote_of(options.address)
        if options.save_quote:
            content = quote
        else:
            content = asyncio.run(dcap_qvl.get_collateral_from_pcs(quote)).to_json().encode()
        write_durably(options.file, content)
    except (DarKnightError, OSError, RuntimeError, ValueError) as error:
        print(f"{options.file} stays as it was: {error}", file=sys.stderr)
        return 1
    print(f"{options.file}: {len(content):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
