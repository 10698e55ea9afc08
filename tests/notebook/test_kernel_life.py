"""Which kernel this is, and whether it will come back."""

from types import SimpleNamespace
from typing import Any

from llmkernel.notebook.kernel_life import KernelLife


class Kernel:
    """What is looked at of an ipykernel."""

    def __init__(self, connection_file: str, key: bytes = b"key") -> None:
        self.parent = SimpleNamespace(connection_file=connection_file)
        self.session = SimpleNamespace(key=key)
        self.asked: list[bool] = []

    def do_shutdown(self, restart: bool) -> dict[str, Any]:
        self.asked.append(restart)
        return {"status": "ok", "restart": restart}


class AnotherKernel:
    """Not an ipykernel."""


def life_of(kernel: Any) -> KernelLife:
    return KernelLife(SimpleNamespace(kernel=kernel))


def test_a_kernel_keeps_its_identity_and_has_it_alone() -> None:
    first, again, other, posing = (
        Kernel("/run/kernel-1.json"),
        Kernel("/run/kernel-1.json"),
        Kernel("/run/kernel-2.json"),
        Kernel("/run/kernel-1.json", b"another key"),
    )
    assert life_of(first).identity == life_of(again).identity != ""
    assert len({life_of(kernel).identity for kernel in (first, other, posing)}) == 3
    assert "key" not in life_of(first).identity


def test_without_a_kernel_there_is_no_identity_and_nothing_to_hear() -> None:
    for shell in (SimpleNamespace(), SimpleNamespace(kernel=None), SimpleNamespace(kernel=AnotherKernel())):
        life = KernelLife(shell)
        life.start(lambda: None)
        life.stop()
        assert (life.identity, life.restarting) == ("", False)


def test_it_hears_whether_the_kernel_comes_back() -> None:
    kernel, ended = Kernel("/run/kernel-1.json"), []
    life = life_of(kernel)
    life.start(lambda: ended.append(True))
    assert kernel.do_shutdown(True) == {"status": "ok", "restart": True}
    assert (life.restarting, ended) == (True, [])
    kernel.do_shutdown(False)
    assert (life.restarting, ended, kernel.asked) == (False, [True], [True, False])
    life.stop()
    life.stop()
    kernel.do_shutdown(True)
    assert (life.restarting, kernel.asked) == (False, [True, False, True])
