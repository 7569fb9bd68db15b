"""The ``prefix-*`` names in ``generate``.

What holds for every call that names one:

- The output is that of the same call without ``cache_implementation``. The longest known token prefix of the prompts
  is reused, but for the last token, which is always fed; prompts and answers are kept in the model's store.
- Rows that share a prefix compute it once, at batch 1; copies of a prompt for beams and returned sequences too.
- Nothing is reused or kept where token ids do not show what was computed: embeddings, images, positions of the caller,
  masks with holes, hidden states or attentions asked for, a model in training mode with dropout, and prompts so long
  that the model's rotary scaling changes. `hpc.last_report` says why.
- A prefix cache that the caller passes takes complete prompts or new tokens alone; see `own_cache`.
"""

from .call import given_prefix
from .reasons import computes_randomly
from .registration import register, unregister
from .warmup import Warmup, warmup

__all__ = ["Warmup", "computes_randomly", "given_prefix", "register", "unregister", "warmup"]
