"""NamedFields: structs that users build by keyword, where a wrong name is told with the nearest right one."""

import difflib
from typing import Any

import msgspec

from llmkernel.errors import InvalidRequestError

__all__ = ["NamedFields"]


class NamedFields(msgspec.StructMeta):
    """Metaclass of such a struct: an unknown keyword is an InvalidRequestError in place of msgspec's TypeError.

    Decoding does not come through here, and what else is wrong with a call stays a TypeError.
    """

    def __call__(cls, *values: Any, **fields: Any) -> Any:
        known = cls.__struct_fields__
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}."
                raise InvalidRequestError(
                    f"Unknown parameter {name!r} of {cls.__name__}; {hint}", parameter=name, value=fields[name]
                )
        return super().__call__(*values, **fields)
