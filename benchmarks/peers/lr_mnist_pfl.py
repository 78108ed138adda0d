# pyright: reportMissingImports=false, reportArgumentType=false
"""LR_MNIST with pfl-research, in one process: its SimulatedBackend and FederatedAveraging, weighted by examples."""

import time

import torch
from lr_mnist_work import BATCH, JOINING, LR, ROUNDS, client, data, report, softmax_regression
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional as F

torch.set_num_threads(1)
net = softmax_regression()
net.loss = lambda x, y, **_: F.cross_entropy(net(x), y)
net.metrics = lambda x, y, **_: {}


class Never(int):
    """An evaluation frequency that no round number is a multiple of; pfl would evaluate in round 0 otherwise."""

    def __rmod__(self, round: int) -> int:
        return 1


joining = iter(data()["joining"].flatten().tolist())  # the clients of our rounds
users = FederatedDataset(lambda i: Dataset(list(client(i)), user_id=str(i)), lambda: next(joining, 0))
model = PyTorchModel(
    model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), 1.0)
)
algorithm = NNAlgorithmParams(
    central_num_iterations=ROUNDS, evaluation_frequency=Never(1), train_cohort_size=JOINING, val_cohort_size=None
)
local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH)
backend = SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByDatapoints()])
began = time.time()
FederatedAveraging().run(algorithm, backend, model, local, send_metrics_to_platform=False)
report("pfl, 1 process", began, time.time(), net)
