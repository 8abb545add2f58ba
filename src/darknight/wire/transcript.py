"""What a worker received and sent, in order, as it was on the wire; of a seed, the share that it is in the place of."""

from __future__ import annotations

from darknight.types import Answer, BackwardTask, Forget, ForwardTask, Message, Record, Refusal, Reply, Weights
from darknight.wire.seeds import share_of


class Transcript:
    """Every tensor that passed through a worker's reader and writer."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    @property
    def records(self) -> list[Record]:
        return list(self._records)

    def take(self) -> list[Record]:
        """The records so far, which are forgotten here."""
        taken, self._records = self._records, []
        return taken

    def received(self, message: Message) -> None:
        detail: dict[str, object]
        match message:
            case Weights():
                detail = {"op": message.op, "prime": message.prime}
                self._add(Record(message.layer, "weights", message.version, message.tensor, detail))
            case ForwardTask():
                detail = {"version": message.version, "compute": message.compute, "keep": message.keep}
                detail["seed"] = message.seed
                self._add(Record(message.layer, "forward.share", message.call, share_of(message), detail))
            case BackwardTask():
                detail = {
                    "version": message.version,
                    "passes": message.passes,
                    "x_shape": message.x_shape,
                    "row": message.row,
                    "seed": message.seed,
                }
                self._add(Record(message.layer, "backward.share", message.call, share_of(message), detail))
            case Forget():
                pass  # numbers of calls and versions; no tensor

    def sent(self, reply: Reply) -> None:
        match reply:
            case Answer():
                for kind, tensor in reply.tensors.items():
                    self._add(Record(reply.layer, f"{kind.value}.reply", reply.call, tensor))
            case Refusal():
                pass

    def _add(self, record: Record) -> None:
        self._records.append(record)
