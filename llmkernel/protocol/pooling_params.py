"""PoolingParams: vLLM's parameters of an embedding request. They exist in every signature; pooling comes later."""

from typing import Any

import msgspec

from llmkernel.protocol.sampling_params import RequestOutputKind

__all__ = ["PoolingParams"]


class PoolingParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """vLLM's fields (engine.md D.10). Refused by name where a request is made, until pooling is built."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
