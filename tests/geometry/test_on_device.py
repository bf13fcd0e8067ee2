import pytest
import torch

from mmdet3d_ext.geometry.on_device import constant, upload


def test_constant_is_new_tensor_and_shared():
    like = torch.zeros(3, dtype=torch.float64)
    found = constant([1, 2.5], like)
    assert torch.equal(found, like.new_tensor([1, 2.5])) and found.dtype == torch.float64
    assert constant((1, 2.5), like) is found
    assert constant((1, 2.5), like.float()).dtype == torch.float32


def test_constant_made_in_inference_mode_can_be_trained_with():
    with torch.inference_mode():
        value = constant([3.0, 7.0, 11.0], torch.zeros(1))
    weight = torch.ones(3, requires_grad=True)
    (weight * constant([3.0, 7.0, 11.0], torch.zeros(1))).sum().backward()
    assert torch.equal(weight.grad, value)


def test_constant_made_under_a_mode_does_not_outlive_it():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode() as mode:
        assert type(constant([13.0, 17.0], torch.zeros(1))) is not torch.Tensor or mode is None
    assert type(constant([13.0, 17.0], torch.zeros(1))) is torch.Tensor


def test_upload_on_the_cpu_is_the_tensor():
    value = torch.arange(3)
    assert upload(value, torch.device('cpu')) is value


@pytest.mark.gpu
def test_nothing_waits():
    like = torch.zeros(1, device='cuda')
    constant([1.0, 4.0], like)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        constant([1.0, 4.0], like) + upload(torch.ones(2), like.device)
    finally:
        torch.cuda.set_sync_debug_mode('default')
