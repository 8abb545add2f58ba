"""What is trusted when keys go to an enclave, in one table."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from darknight.client.conversation import Conversation


def trust_table(conversation: Conversation) -> Table:
    """Evidence, program, configuration, workers."""
    verdict, configuration = conversation.attested.verdict, conversation.configuration
    title = "SIMULATED evidence: it protects nothing" if verdict.simulated else "Evidence verified"
    table = Table(title=title, box=box.SIMPLE, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("platform", f"{verdict.facts.format.upper()}, TCB {verdict.status or verdict.tcb or 'unknown'}")
    table.add_row("measurement", verdict.facts.measurement.hex())
    if verdict.facts.signer is not None:
        table.add_row("signer", verdict.facts.signer.hex())
    table.add_row("configuration", conversation.offer.configuration_digest.hex())
    table.add_row("darknight", str(configuration.get("version")))
    for worker in configuration.get("workers", []):
        table.add_row("worker", Text(f"{worker['name']}, operator {worker['operator']}\n{worker['fingerprint']}"))
    if configuration.get("insecure_one_operator"):
        table.add_row("WARNING", "one operator may hold all shares: nothing is hidden from it")
    for note in verdict.notes:
        table.add_row("note", Text(note))
    return table
