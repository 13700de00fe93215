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
