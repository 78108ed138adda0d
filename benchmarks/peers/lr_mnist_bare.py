"""LR_MNIST as a bare PyTorch loop."""

import time

import torch
from lr_mnist_work import client, data, report, softmax_regression, train

torch.set_num_threads(1)
model = softmax_regression()
weights = [p.detach().clone() for p in model.parameters()]
began = time.time()
for joining in data()["joining"].tolist():
    totals, n = [torch.zeros_like(w) for w in weights], 0
    for i in joining:
        x, y = client(i)
        with torch.no_grad():
            for p, w in zip(model.parameters(), weights, strict=True):
                p.copy_(w)
        train(model, x, y)
        with torch.no_grad():
            for total, p in zip(totals, model.parameters(), strict=True):
                total.add_(p, alpha=len(y))
        n += len(y)
    weights = [total / n for total in totals]
ended = time.time()
with torch.no_grad():
    for p, w in zip(model.parameters(), weights, strict=True):
        p.copy_(w)
report("bare loop", began, ended, model)
