"""The devices that are proved in a process of their own: JAX and tinygrad start threads and keep them.

Run by ``test_doors.py``; ``pytest tests/frameworks/suites.py::TestJax`` runs one by hand.
"""

from __future__ import annotations

import gc
import shutil
from typing import Any, ClassVar

import numpy as np
import pytest

from penstock.testing import DeviceSuite

KEEPS = pytest.mark.leaves("thread", "fd", "mapping", "child", "temp", reason="the framework's own, kept by it")


@KEEPS
class TestJax(DeviceSuite):
    to = "jax"

    @pytest.fixture(autouse=True)
    def _there(self) -> None:
        pytest.importorskip("jax", reason="JAX is not installed")

    def live_bytes(self) -> int | None:
        import jax

        return sum(int(array.nbytes) for array in jax.live_arrays() if not array.is_deleted())

    def test_live_arrays_stay_as_many_over_three_epochs(self) -> None:
        """JAX allocates each batch anew; after the first ones there are never more of them, nor more bytes."""
        import jax

        with self._feed(num_workers=1) as feed:
            seen: list[set[tuple[int, int]]] = []
            for _ in range(3):
                found = set()
                for number, batch in enumerate(feed):
                    self._check(batch, number)
                    gc.collect()
                    live = sum(not array.is_deleted() for array in jax.live_arrays())
                    found.add((live, self.live_bytes() or 0))
                seen.append(found)
            assert max(seen[1]) == max(seen[0])
            assert max(seen[2]) == max(seen[0])
            del batch

    def test_a_device_is_named_by_platform_and_number(self) -> None:
        """And one that is not there is refused with those that are."""
        import jax

        devices = jax.devices("cpu")
        for number, device in enumerate(devices):
            with self._feed(8, to=f"jax:cpu:{number}") as feed:
                assert {d for batch in feed for d in batch["image"].devices()} == {device}
        with pytest.raises(ValueError, match=rf"has no device 'cpu:{len(devices)}', only cpu:0"):
            self._feed(8, to=f"jax:cpu:{len(devices)}")

    def test_what_is_done_on_accelerators_keeps_samples_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """There JAX owns the memory. Its CPU device does as well, if it is treated like one."""
        import penstock.jax

        device = penstock.jax.device("cpu")
        device._host = None
        monkeypatch.setattr(self, "device", lambda: device)
        self.test_kept_rows_are_gathered_in_any_order()

        def load(item: int) -> Any:
            return np.full(8, item, np.float32), item

        with self._feed(to=device, load=load, cache="device", device_memory="1 MiB", shuffle=True) as feed:
            live = []
            for _ in range(4):
                seen = []
                for x, y in feed:
                    assert (self.host(x) == self.host(y)[:, None]).all()
                    seen += self.host(y).tolist()
                assert sorted(seen) == list(range(42))
                live.append(self.live_bytes())
            assert feed.stats.cached == 3 * 42
            assert live[1] == live[2] == live[3]
            del x, y

    def test_a_sharding_spreads_a_batch_over_devices(self) -> None:
        """Each device gets its part, and the parts together are the batch."""
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        import penstock.jax

        devices = jax.devices("cpu")
        if len(devices) < 2:
            pytest.skip("one device only: set XLA_FLAGS=--xla_force_host_platform_device_count=2")
        spread = NamedSharding(Mesh(np.array(devices[:2]), ("data",)), PartitionSpec("data"))
        with self._feed(40, to=penstock.jax.device(sharding=spread), num_workers=1) as feed:
            for number, batch in enumerate(feed):
                self._check(batch, number, 40)
                assert [shard.data.shape[0] for shard in batch["image"].addressable_shards] == [2, 2]
            assert feed.stats.copied == 0
            del batch


@KEEPS
class TestJaxSharded(TestJax):
    """Two devices of the host, each with half of a batch."""

    @property
    def to(self) -> Any:  # type: ignore[override]
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        import penstock.jax

        mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
        return penstock.jax.device(sharding=NamedSharding(mesh, PartitionSpec()))


class _Tinygrad(DeviceSuite):
    name: ClassVar[str]
    needs: ClassVar[str]
    _counted: ClassVar[list[int]] = []

    @pytest.fixture(autouse=True)
    def _there(self) -> None:
        pytest.importorskip("tinygrad", reason="tinygrad is not installed")
        if self.name == "CPU" and shutil.which("clang") is None:
            pytest.skip("tinygrad's CPU device needs clang (apt install clang)")
        from tinygrad import Device as Devices

        try:
            runtime = Devices[self.name]
        except Exception as error:  # noqa: BLE001 - whatever it says when the driver is missing
            pytest.skip(f"tinygrad has no {self.name} here (apt install {self.needs}): {error}")
        # What the device is really asked for: tinygrad's own cache lies above this.
        kind = type(runtime.allocator)
        if not hasattr(kind, "counted_by_penstock"):
            original = kind._alloc

            def counted(allocator: Any, *args: Any) -> Any:
                kind.counted_by_penstock += 1
                return original(allocator, *args)

            kind._alloc, kind.counted_by_penstock = counted, 0

    def allocated(self) -> int | None:
        from tinygrad import Device as Devices

        return int(type(Devices[self.name].allocator).counted_by_penstock)


@KEEPS
class TestTinygradCPU(_Tinygrad):
    to, name, needs = "tinygrad:CPU", "CPU", "clang"


@KEEPS
class TestTinygradCL(_Tinygrad):
    to, name, needs = "tinygrad:CL", "CL", "pocl-opencl-icd"
