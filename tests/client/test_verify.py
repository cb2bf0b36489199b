"""Live and held weights against checkpoints on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from awexd_client import IntegrityError, InvalidArgument, Shard, WeightWriter, WorkerWeightsReader
from awexd_client import verify as verifying
from awexd_client.adapters.experts import in_pairs
from awexd_client.held import HeldVersion
from awexd_client.holding import Holding
from awexd_client.verify import Checkpoint, verify
from awexd_transports.errors import VersionUnavailable
from awexd_transports.layout import Box, Entry, TensorSpec
from awexd_transports.shard import PAIRS
from awexd_transports.view import View
from tests.client.samples import Negating
from tests.daemons import Daemon


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "embed": random(40, 8),
        "norm": random(8).to(torch.bfloat16),
        "scale": random(),
        "deep": random(3, 4, 5),
        "flags": random(6) > 0,
        "empty": random(0, 4),
    }


def save(tensors: Mapping[str, torch.Tensor], folder: Path, *, parts: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    if parts == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    index: dict[str, str] = {}
    for part in range(parts):
        file = f"model-{part}.safetensors"
        chosen = names[part::parts]
        save_file({name: tensors[name] for name in chosen}, folder / file)
        index |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def parts_of(tensors: Mapping[str, torch.Tensor]) -> list[tuple[Entry, View]]:
    return [
        (Entry(TensorSpec(name, tuple(t.shape), str(t.dtype)[6:]), Box((0,) * t.ndim, tuple(t.shape)), at), View.of(t))
        for at, (name, t) in enumerate(tensors.items())
    ]


@pytest.mark.parametrize("parts", [1, 3])
def test_equal_weights(tmp_path: Path, parts: int) -> None:
    with Checkpoint(save(model(), tmp_path / "c", parts=parts)) as checkpoint:
        seen: list[tuple[int, int]] = []
        found = verify(parts_of(model()), checkpoint, progress=lambda *at: seen.append(at)).check()
    assert (found.tensors, found.unseen, found.differences) == (6, (), ())
    assert seen[-1] == (found.nbytes, found.nbytes)


@settings(deadline=None)
@given(data=st.data())
def test_first_element_that_differs_is_named(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("c")
    live = model()
    name = data.draw(st.sampled_from([name for name, tensor in live.items() if tensor.numel()]))
    flat = live[name].view(-1)
    first = data.draw(st.integers(0, len(flat) - 1))
    for at in {first, len(flat) - 1}:
        flat[at] = ~flat[at] if flat.dtype == torch.bool else -flat[at] - 1
    index = tuple(int(n) for n in torch.unravel_index(torch.tensor(first), live[name].shape))
    with pytest.MonkeyPatch.context() as patch, Checkpoint(save(model(), folder)) as checkpoint:
        patch.setattr(verifying, "CHUNK_BYTES", data.draw(st.sampled_from([1, 64, 1 << 20])))
        (difference,) = verify(parts_of(live), checkpoint).differences
    assert (difference.name, difference.index) == (name, index)
    assert difference.found == live[name][index].item()
    assert difference.expected == model()[name][index].item()


def test_checkpoint_of_another_dtype_is_cast_to_the_weights_own(tmp_path: Path) -> None:
    saved = model()
    live = saved | {"embed": saved["embed"].to(torch.bfloat16), "norm": saved["norm"].to(torch.float32)}
    with Checkpoint(save(saved, tmp_path / "c")) as checkpoint:
        verify(parts_of(live), checkpoint).check()
        live["embed"][3, 1] += 1
        assert verify(parts_of(live), checkpoint).differences[0].index == (3, 1)


def test_sign_of_zero_and_bits_of_nan_count(tmp_path: Path) -> None:
    saved = {"w": torch.tensor([0.0, float("nan"), 1.0])}
    with Checkpoint(save(saved, tmp_path / "c")) as checkpoint:
        verify(parts_of(saved), checkpoint).check()
        live = {"w": torch.tensor([-0.0, float("nan"), 1.0])}
        assert verify(parts_of(live), checkpoint).differences[0].index == (0,)


def test_missing_misshapen_and_mistyped_tensors_are_told(tmp_path: Path) -> None:
    saved = model()
    live = saved | {"extra": torch.zeros(2), "deep": torch.zeros(3, 4, 6), "flags": torch.zeros(6)}
    del live["norm"]
    with Checkpoint(save(saved, tmp_path / "c")) as checkpoint:
        found = verify(parts_of(live), checkpoint)
    assert [str(one) for one in found.differences] == [
        "deep: [3, 4, 6], in the checkpoint [3, 4, 5]",
        "flags: torch.float32, in the checkpoint torch.bool",
        "extra: the checkpoint has no tensor of that name",
    ]
    assert found.unseen == ("norm",)
    with pytest.raises(IntegrityError, match=r"3 of 6 tensors are not the checkpoint's: deep.*; also flags, extra"):
        found.check()


def test_tied_head_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    saved = model()
    live = saved | {"head": saved["embed"]}
    with Checkpoint(save(saved, tmp_path / "c")) as checkpoint:
        assert verify(parts_of(live), checkpoint).check().tensors == 6


def test_paired_experts_of_gpt_oss(tmp_path: Path) -> None:
    experts, bias = torch.randn(4, 6, 10), torch.randn(4, 10)
    names = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj_bias")
    folder = save(dict(zip(names, (experts, bias), strict=True)), tmp_path / "c")
    up_of_two = in_pairs(Shard(names[0], experts[1:3, :, 4:8].clone(), (4, 6, 10), (1, 0, 4)))
    live = [Shard(names[0], up_of_two.tensor[..., 1:], up_of_two.global_shape, (1, 0, 2, 1), layout=PAIRS)]
    live.append(Shard(names[1], bias.clone()))
    with Checkpoint(folder) as checkpoint:
        holding = Holding.of(live)
        parts = list(zip(holding.manifest.entries, holding.views, strict=True))
        assert verify(parts, checkpoint).check().nbytes == (2 * 6 * 2 + 40) * 4
        live[0].tensor[1, 5, 1, 0] += 1
        (difference,) = verify(parts, checkpoint).differences
    assert difference.index == (2, 5, 3, 1)


@pytest.mark.parametrize("content", [None, "nothing here", '{"weight_map": {"a": "../other.safetensors"}}'])
def test_folder_that_is_no_checkpoint(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        name = "model.safetensors.index.json" if content.startswith("{") else "model.safetensors"
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidArgument, match=str(tmp_path)):
        Checkpoint(tmp_path)


def test_live_tensors_of_a_reader(writer: WeightWriter, reader: WorkerWeightsReader, tmp_path: Path) -> None:
    new, live = model(1), model(0)
    old_folder, new_folder = save(model(0), tmp_path / "old"), save(new, tmp_path / "new", parts=2)
    writer.register(new)
    reader.register(live)
    reader.verify(old_folder)
    writer.publish(1)
    reader.update()
    assert reader.verify(new_folder).tensors == 6
    with pytest.raises(IntegrityError, match=r"embed\[0, 0\] is .*, in the checkpoint "):
        reader.verify(old_folder)
    live["deep"][2, 3, 4] += 1
    with pytest.raises(IntegrityError, match=r"1 of 6 .* deep\[2, 3, 4\]"):
        reader.verify(new_folder)


def test_part_of_a_tensor_in_its_place(writer: WeightWriter, reader: WorkerWeightsReader, tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(10, 6)
    folder = save({"w": whole}, tmp_path / "c")
    half = whole[:, 2:5].clone()
    reader.register([Shard("w", half, (10, 6), (0, 2))])
    reader.verify(folder)
    half[7, 1] = -1
    with pytest.raises(IntegrityError, match=r"w\[7, 3\] is -1.0, in the checkpoint 45.0"):
        reader.verify(folder)


def test_what_an_engine_keeps_in_another_form_is_named(reader: WorkerWeightsReader, tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    reader.register(tensors, Negating())
    found = reader.verify(save(tensors, tmp_path / "c"))
    assert (found.tensors, dict(found.aside), found.unseen) == (1, {"b": "it is kept negated"}, ())


def test_held_version_and_awexctl_verify(daemon: Daemon, writer: WeightWriter, tmp_path: Path) -> None:
    folder = save(model(), tmp_path / "c")
    tensors = model()
    writer.register(tensors)
    with pytest.raises(VersionUnavailable, match="no version is held"):
        HeldVersion("grpo", None, daemon.socket)
    writer.publish(1)
    tensors["embed"][7, 2] += 1
    writer.publish(2)

    def awexctl(*arguments: str) -> tuple[int, Any]:
        command = [sys.executable, "-m", "awexd.ctl", "verify", "--socket", daemon.socket, "--checkpoint", str(folder)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr

    code, told = awexctl("--job", "grpo", "--step", "1", "--json")
    assert (code, json.loads(told)["equal"], json.loads(told)["tensors"]) == (0, True, 6)
    code, told = awexctl("--job", "grpo")
    assert code == 1
    assert told.startswith("epoch 1 step 2: 6 tensors, ")
    assert "1 differ\n  embed[7, 2] is" in told
    assert awexctl("--job", "grpo", "--step", "9", "--timeout", "0.5")[0] == 1
    code, told = awexctl("--job", "other")
    assert (code, "no job root/other here" in told) == (1, True)
    (job,) = daemon.ask("status")["jobs"]
    assert job["engines"] == [], "it has left"
