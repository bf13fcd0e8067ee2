"""Small heads with the interface of the real ones, for tests of the detector."""
import torch
from torch import nn


class DummyObjectHead(nn.Module):
    """Boxes are (classes, X, Y) score maps; the losses and statistics have the same names whatever the sample holds."""

    def __init__(self, in_channels=None):
        super().__init__()
        self.score = nn.LazyConv2d(2, 1) if in_channels is None else nn.Conv2d(in_channels, 2, 1)

    def forward(self, x, metas):
        assert len(metas) == len(x)
        return {'score': self.score(x)}

    def loss(self, boxes, labels, preds):
        target = torch.stack([torch.as_tensor(float(len(b)), device=preds['score'].device) for b in boxes])
        return {'loss_heatmap': (preds['score'].mean((1, 2, 3)) - target).square().mean(),
                'matched': target.mean().detach()}

    def get_bboxes(self, preds, metas):
        return [(score.flatten(1).T[:3], score.flatten()[:3].sigmoid(), torch.zeros(3, dtype=torch.long))
                for score in preds['score']]


class DummyMapHead(nn.Module):
    """One convolution; cross entropy per class in training, probabilities in evaluation."""

    def __init__(self, in_channels=None, classes=('road', 'divider')):
        super().__init__()
        self.classes = classes
        self.conv = nn.LazyConv2d(len(classes), 1) if in_channels is None else nn.Conv2d(in_channels, len(classes), 1)

    def forward(self, x, target=None):
        logits = self.conv(x)
        if not self.training:
            return logits.sigmoid()
        size = [min(a, b) for a, b in zip(logits.shape[-2:], target.shape[-2:], strict=True)]
        logits, target = logits[..., :size[0], :size[1]], target[..., :size[0], :size[1]].float()
        return {f'{name}/focal': nn.functional.binary_cross_entropy_with_logits(logits[:, i], target[:, i])
                for i, name in enumerate(self.classes)}
