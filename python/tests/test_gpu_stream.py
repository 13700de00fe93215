"""Scales of CUDA tensors that arrive one by one, computed on their device."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
pytest.importorskip("transformers")

import test_torch_stream as cpu  # noqa: E402

import sigmascale  # noqa: E402


@pytest.mark.parametrize("family", cpu.MODELS)
def test_cuda_tensors_have_the_scales_of_calibrate(family, tmp_path):
    weights = cpu.written(family, tmp_path)
    stream = sigmascale.ScaleStream(tmp_path)
    for seed in range(2):
        order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(seed)).tolist()
        for place in order:
            name, tensor = weights[place]
            sent = tensor.cuda()
            stream.push(name, sent)
            # The sync uses its memory again.
            sent.fill_(100.0)
        stream.finish()
        assert stream._device is not None
        cpu.check(stream, tmp_path)


def test_tensors_may_come_on_several_streams(tmp_path):
    weights = cpu.written("llama", tmp_path)
    stream, streams = sigmascale.ScaleStream(tmp_path), [torch.cuda.Stream() for _ in range(2)]
    for _ in range(3):
        for place, (name, tensor) in enumerate(weights):
            with torch.cuda.stream(streams[place % 2]):
                sent = tensor.cuda(non_blocking=True)
                stream.push(name, sent)
                sent.fill_(100.0)
        stream.finish()
        cpu.check(stream, tmp_path)


def test_weights_that_are_not_finite_are_reported_when_scales_are_read(tmp_path):
    weights = [(name, tensor.cuda()) for name, tensor in cpu.written("llama", tmp_path)]
    stream = sigmascale.ScaleStream(tmp_path)
    for name, tensor in weights:
        broken = "layers.1.self_attn.k_proj" in name
        stream.push(name, torch.full_like(tensor, float("nan")) if broken else tensor)
    with pytest.raises(sigmascale.NonFiniteError, match="layer 1: .*finite"):
        stream.finish()
    list(stream.through(weights))
    cpu.check(stream, tmp_path)
