"""One layer call: mask, send, check, unmask, record. The protocol of the paper, from the enclave's side.

runtime        the door: checks what comes in, holds the lock and the ledger
field, real    one layer call in each arithmetic: rounding, retries, dtypes
masked_field, masked_real   its products by workers: encode, dispatch, decode, verify
unmasking      the last two of these (Field); chunks: large batches in several parts
alone          its products in the enclave, without workers
operand, shares what is masked (Field), and where its shares lie
scales, bounds what values are scaled by (Field), what scales the noise (Real)
exchange       what goes over the fleet: calls, weights by version, answers, forgetting
checking       which check a pass gets, and what the ledger hears of it
autograd       whether a backward pass is under way
rates, threads how fast this machine does all that, on one thread
phases         where the enclave's time goes, while somebody measures
allocator      memory that is used again
layer          what is remembered of a layer from call to call, and of a call until its backward pass
"""

from darknight.coding import Finish
from darknight.runtime.allocator import keep_memory
from darknight.runtime.layer import Layer, Saved
from darknight.runtime.rates import measured_rates, sharing_of
from darknight.runtime.runtime import Runtime

__all__ = ["Finish", "Layer", "Runtime", "Saved", "keep_memory", "measured_rates", "sharing_of"]
