# pyright: reportMissingImports=false
"""The client of lr_mnist_flower.py, imported by its actors. A process keeps its model, which is kind to Flower."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from lr_mnist_work import client, softmax_regression, train
from torch import nn

models: list[nn.Module] = []
app = ClientApp()


@app.train()
def local_epoch(message: Message, context: Context) -> Message:
    """The epoch of the client that the message names."""
    if not models:
        torch.set_num_threads(1)
        models.append(softmax_regression())
    model = models[0]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = client(int(message.content["config"]["client"]))
    train(model, x, y)
    content = RecordDict(
        {
            "arrays": ArrayRecord.from_torch_state_dict(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
    )
    return Message(content=content, reply_to=message)
