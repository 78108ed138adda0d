"""The sections of an experiment's configuration: frozen dataclasses whose fields have a range and a help text.

A component (algorithm, data set, partition, ...) defines its constants in its own module. The string below a field is
the field's text in ``--help``. Names follow the papers: alpha (concentration of the Dirichlet partition), p (share of
shared data), rho (share of a client's images that its generator sees), C (``participation``), E (``epochs``), B.
"""

from dataclasses import dataclass
from typing import Annotated

from fedcommons.config.section import Section
from fedcommons.config.tracking_fields import Tracking


@dataclass(frozen=True)
class Data(Section):
    """The data set, and the images that are held out for validation and for the clients' tests."""

    name: str = "digits"
    """data set of the run"""
    dir: str | None = None
    """folder of the data sets, in torchvision's layout; null: the environment variable FEDCOMMONS_DATA, else ./data"""
    download: bool = False
    """download the data set into data.dir, and pretrained weights (model.weights), if they are missing"""
    validation: Annotated[float, "[0, 0.5]"] = 0.1
    """share of the training images that is held out for validation before the images are partitioned; 0: none"""
    validation_from: Annotated[str, "random | last"] = "random"
    """training images that are held out for validation: random, or last (of the file, as in Fedssyn's released code)"""
    public: Annotated[float, "[0, 0.5]"] = 0.0
    """share of the training images that no client gets: public images without labels for the server (feddf); 0: none"""
    split: Annotated[str, "random | fixed"] = "fixed"
    """random choice of validation and public images, images of data.limit, and test images of data without a test set:
    fixed (equal in all runs, so intervals over seeds leave out this randomness) or random (by the run's seed)"""
    limit: Annotated[int | None, "[1, 1e9]"] = None
    """number of training images to use, drawn at random after the validation images (null: all images)"""
    client_test: Annotated[float, "[0, 0.5]"] = 0.0
    """share of each client's images that is held out as this client's test set (at least one image); these images are
    used neither for training nor for sharing. 0: no images are held out; the clients still have test sets if each
    client consists of whole groups (such as writers) and the data set's test images have groups"""
    augment: bool | None = None
    """flip and crop training images at random; null: as the data set defines, which is true for CIFAR only"""
    standardise: bool = True
    """subtract the data set's mean from the pixels, and divide by the standard deviation, before the model sees them;
    false: the model sees pixels in [0, 1]"""


@dataclass(frozen=True)
class Partition(Section):
    """The assignment of training images to clients."""

    name: str = "dirichlet_classes"
    """rule that assigns the training images to clients"""
    n_clients: Annotated[int, "[1, 1e9]"] = 10
    """N, number of clients. dirichlet_plain and dirichlet_clients_all drop clients that get no images. by_group and
    by_factor ignore N: they create partition.join clients or, if it is null, one per group or value of the factor"""
    shift: Annotated[str, "none | noise | rotation | colour"] = "none"
    """feature shift between clients, which grows with the client's number: none, noise (Gaussian), rotation or colour
    (random factor per colour channel)"""
    shift_size: Annotated[float | None, "(0, 360]"] = None
    """size of the last client's feature shift: variance of noise on pixels in [0, 1] (null: 0.1), degrees of rotation
    (null: 90), or largest relative change of a colour channel (null: 0.5)"""


@dataclass(frozen=True)
class Generator(Section):
    """The generative model that every client trains on a share of its data, if the sharing strategy needs one."""

    name: str = "ddpm"
    """generative model that every client trains to draw synthetic images"""
    label_noise: Annotated[float, "[0, 1e6]"] = 0.0
    """standard deviation (number of images) of the Gaussian noise that is added to each of a client's class counts; the
    labels of synthetic images follow the noisy counts. 0: exact counts, which have no privacy guarantee"""
    rho: Annotated[float, "(0, 1]"] = 0.75
    """rho, share of a client's images on which its generator is trained"""


@dataclass(frozen=True)
class Sharing(Section):
    """The sharing strategy, which adds shared data to the clients' training data before round 1."""

    setting: str = "real"
    """sharing strategy, which decides what data clients get before round 1 in addition to their own data; real or none:
    no sharing"""
    audit: bool = False
    """test for memorisation: before synthetic images leave a client, compare them with the generator's training images
    and with held-out images, and write the result to audit.json"""
    withhold: Annotated[str, "none | near_copies"] = "none"
    """synthetic images that are not shared: none, or near_copies (images that the audit finds too close to a training
    image of the generator). near_copies runs the audit too, and the images then have no privacy guarantee (epsilon)"""

    @property
    def is_audited(self) -> bool:
        """Return whether synthetic images are audited: ``withhold`` needs the audit's result too."""
        return self.audit or self.withhold != "none"


@dataclass(frozen=True)
class Model(Section):
    """The model that the clients train together."""

    name: str = "cnn"
    """network, or LightningModule, that the clients train"""
    projection: Annotated[int | None, "[1, 1e6]"] = None
    """number of outputs of a projection head in front of the network's last layer (MOON: 256); null: no such head"""
    weights: str | None = None
    """initial weights: a file (.safetensors or a state dict of torch.save), or pretrained weights of torchvision
    (torchvision:ResNet18_Weights.DEFAULT); null: random weights from seed"""
    weights_map: str | None = None
    """pairs OLD=NEW that replace prefixes of names in the weights file, such as backbone.=body. (null: none)"""
    weights_strict: bool = True
    """whether file and model must have equal names and shapes; false: tensors that differ are listed and not loaded"""


@dataclass(frozen=True)
class Client(Section):
    """Local training: the optimizer, and the minibatch steps of a client in a round."""

    optimizer: Annotated[str, "sgd | adam"] = "sgd"
    """optimizer of local training: sgd or adam"""
    lr: Annotated[float, "(0, 1e38]"] = 0.05
    """learning rate of local training; client.lr_schedule multiplies it by a factor per round"""
    lr_schedule: str = "constant"
    """learning rate schedule, which multiplies client.lr by a factor in each round"""
    momentum: Annotated[float, "[0, 1)"] = 0.0
    """momentum of SGD, whose buffer starts at zero in every round; 0: no momentum (required with adam)"""
    weight_decay: Annotated[float, "[0, 1e38]"] = 0.0
    """weight decay of the optimizer (L2 penalty on the weights); 0: none"""
    epochs: Annotated[int, "[1, 1e9]"] = 10
    """E, number of epochs (passes over the client's data) per round"""
    batch_size: Annotated[int, "[1, 1e9]"] = 32
    """B, number of images per minibatch"""
    drop_last: bool = False
    """skip the last minibatch of an epoch if it is not full; a client's only minibatch is never skipped"""
    equal_work: bool = True
    """keep the number of steps about equal to that without sharing: a client with n_i own and n~ shared images trains
    for max(1, floor(n_i E/(n_i + n~))) epochs, where E is client.epochs; false: E epochs"""
    clip_norm: Annotated[float | None, "(0, inf)"] = None
    """maximum L2 norm of a step's gradient, which is clipped before the federated method adds its correction (null: no
    clipping)"""
    accumulate: Annotated[int, "[1, 1e9]"] = 1
    """gradient accumulation: number of minibatches per optimizer step, whose gradients are averaged as for one large
    batch; the last step of an epoch may have fewer minibatches. 1: no accumulation"""
    precision: Annotated[str, "fp32 | tf32 | bf16 | fp16-mixed"] = "fp32"
    """number format of local training: fp32; tf32 (matrix products and convolutions on GPUs; equal to fp32 on CPUs);
    bf16 or fp16-mixed (torch.autocast; the loss scale of fp16-mixed is reset for each client in each round)"""
    batched: bool = False
    """train all clients of a block (see federation.blocks) in one vectorised program (torch.vmap): faster for small
    images, but results differ by rounding"""
    graphs: bool = False
    """run each training step as a CUDA graph: faster for small networks on a GPU; no effect on a CPU"""
    onednn: bool = True
    """use oneDNN's convolutions on CPUs in training. false is faster for small images, so presets smoke and small set
    false for the data set digits. No effect with client.batched true, which always uses oneDNN"""


@dataclass(frozen=True)
class Federation(Section):
    """Rounds, client sampling, aggregation, early stopping, and the processes in which clients run."""

    rounds: Annotated[int, "[1, 1e9]"] = 30
    """R, number of communication rounds"""
    participation: Annotated[float, "(0, 1]"] = 1.0
    """C, share of the clients that is sampled in each round; 1: all clients"""
    sampling: Annotated[str, "fixed | poisson"] = "fixed"
    """client sampling: fixed (C N clients, without replacement) or poisson (each client independently with probability
    C, so rounds differ in size and may be empty; with dp.noise secret the draw is secret)"""
    weighting: Annotated[str, "uniform | samples"] = "uniform"
    """weights of clients in the server's averages: uniform (equal) or samples (n_i, the client's number of examples)"""
    aggregation: str = "mean"
    """rule by which the server aggregates updates: mean, or a rule that resists Byzantine clients (median,
    trimmed_mean:0.1, krum:F, multi_krum:F:M or geometric_median), for methods that average updates. trimmed_mean:0.1
    omits the smallest and the largest tenth of the values; krum and multi_krum assume F Byzantine clients; multi_krum
    averages M updates"""
    blocks: Annotated[int, "[1, 1e6]"] = 4
    """number of groups (blocks) into which a round's clients are divided; replies are added within each block, then
    over blocks. The number affects rounding: results are reproducible on other machines only with the same number"""
    executor: Annotated[str, "serial | ray_actors"] = "serial"
    """where clients run: serial (in this process) or ray_actors (in processes of Ray); the results are bitwise equal"""
    actors: Annotated[int, "[1, 1e9]"] = 2
    """number of Ray processes for executor ray_actors, at most federation.blocks"""
    gpus_per_actor: Annotated[float | str, "[0.0001, 1] or auto"] = "auto"
    """share of a GPU that each Ray process reserves: 0.25 runs four processes on one GPU; no effect without a GPU.
    auto: measure the memory of one process first, then spread the processes over all GPUs, as far as memory allows"""
    transport: Annotated[str, "auto | fast | calls"] = "auto"
    """how executor ray_actors sends messages: fast (sockets; all processes must be on this machine), calls (by Ray) or
    auto (sockets to processes on this machine, calls to others). Calls send every message above 16 MB to all clients"""
    checkpoint_every: Annotated[int, "[1, 1e9]"] = 5
    """number of rounds between two checkpoints, from which --resume continues"""
    buffers: Annotated[str, "average | keep"] = "average"
    """running statistics of BatchNorm: average (the server averages them like weights) or keep (each client keeps its
    own statistics, which are never sent)"""
    memory_mb: Annotated[float, "(0, inf]"] = 1024.0
    """maximum RAM, in MB (10^6 bytes), for the state that clients keep between rounds (such as control variates); the
    state above this maximum is stored in the run folder. inf: no limit"""
    max_norm: Annotated[float | None, "(0, inf)"] = None
    """maximum L2 norm of all values that a client sends for aggregation in a round; the server rejects larger replies
    (null: no maximum)"""
    stop: Annotated[str, "never | target | patience"] = "never"
    """early stopping: never (run all R rounds), target (stop once the target is reached) or patience (stop once
    stop_metric has not improved for stop_patience rounds)"""
    stop_patience: Annotated[int, "[1, 1e9]"] = 10
    """number of rounds without a new best stop_metric after which federation.stop patience ends the run"""
    stop_metric: str = "accuracy"
    """metric on validation data that federation.stop patience monitors: accuracy, loss, or a metric followed by max or
    min (the better direction), such as "f1 max" """

    @property
    def processes(self) -> int:
        """Return the number of processes that train clients at the same time: ``actors`` with Ray, else 1."""
        return self.actors if self.executor == "ray_actors" else 1


@dataclass(frozen=True)
class Communication(Section):
    """Compression of the updates that clients send to the server. Messages to clients are not compressed."""

    compress: str = "none"
    """compression of updates: none, topk:SHARE (send the share of values with the largest magnitudes, such as
    topk:0.01) or qsgd:BITS (round each value randomly to BITS bits, such as qsgd:4)"""
    error_feedback: bool = True
    """topk only: each client adds the values that it has not sent yet to its next update"""


@dataclass(frozen=True)
class Straggler(Section):
    """Stragglers: participants of a round that do not finish their local training in time."""

    rule: str = "independent"
    """straggler rule, which decides which participants of a round do not finish in time"""
    partial: Annotated[str, "method | take | drop"] = "method"
    """use of the partial work of stragglers (rules deadline and slow): take (the server aggregates partial work),
    drop (the server ignores partial work) or method (as the federated method defines; FedProx takes it)"""


@dataclass(frozen=True)
class Attack(Section):
    """Byzantine clients, which send false updates or train on false data."""

    name: Annotated[str, "none | sign_flip | gaussian | alie | label_flip | backdoor"] = "none"
    """attack of the Byzantine clients: none; on updates: sign_flip (the negative update), gaussian (random numbers) or
    alie (mean minus some standard deviations); on training data: label_flip (class y becomes C - 1 - y) or backdoor
    (half of the images get a white square and the class attack.target). With backdoor, rounds.jsonl has attack/success:
    the share of other classes' test images with the square that the server model assigns to attack.target"""
    share: Annotated[float, "[0, 0.5]"] = 0.2
    """share of the N clients that are Byzantine, drawn by the run's seed; partition.json lists them"""
    scale: Annotated[float, "(0, 1e38]"] = 1.0
    """gaussian: standard deviation of the false updates; alie: factor of the paper's z"""
    target: Annotated[int, "[0, 1e9]"] = 0
    """class that images with the backdoor's square get"""


@dataclass(frozen=True)
class DP(Section):
    """Differential privacy of local training (DP-SGD) and of the server's models, and the source of all noise."""

    local: bool = False
    """train clients with DP-SGD: Poisson-sampled batches, per-example gradient clipping and Gaussian noise"""
    noise_multiplier: Annotated[float, "[0.001, 1e6]"] = 1.0
    """sigma, standard deviation of DP-SGD's noise divided by the clipping norm; unused if dp.target_epsilon is set"""
    target_epsilon: Annotated[float | None, "(0, 1000]"] = None
    """epsilon that each client's local training may spend over all rounds; the noise multiplier of each client is
    computed from this epsilon (null: dp.noise_multiplier applies)"""
    clip: Annotated[float, "[1e-30, 1e30]"] = 5.0
    """clipping norm of DP-SGD: maximum L2 norm of the gradient of one example"""
    delta: Annotated[float, "[1e-250, 1)"] = 1e-5
    """delta of the (epsilon, delta) privacy guarantee"""
    at_once: Annotated[int, "[1, 1e9]"] = 1
    """number of examples whose gradients DP-SGD computes in one vectorised call: 1 is fastest on most CPUs, some dozens
    on a GPU; the number affects rounding. Methods that define their own loss always use 1"""
    central: bool = False
    """user-level central DP: clients' updates are clipped, and the trusted server adds Gaussian noise to their sum;
    protects a client's whole data set against all who see only the server's models"""
    central_clip: Annotated[float, "[1e-30, 1e30]"] = 1.0
    """clipping norm of dp.central: maximum L2 norm of a client's update (with dp.central_quantile: in round 1)"""
    central_noise: Annotated[float, "[0.001, 1e6]"] = 1.0
    """z, standard deviation of dp.central's noise on the sum of updates, divided by the clipping norm; unused if
    dp.central_epsilon is set"""
    central_epsilon: Annotated[float | None, "(0, 1000]"] = None
    """target epsilon of dp.central at user level, for all rounds; z is the smallest value that meets this target
    (null: z is dp.central_noise)"""
    central_quantile: Annotated[float | None, "(0, 1)"] = None
    """gamma, quantile of the updates' norms that the clipping norm of dp.central follows, at no further privacy cost
    (paper: 0.5); null: the clipping norm is constant"""
    noise: Annotated[str, "seeded | secret"] = "seeded"
    """source of the privacy noise. seeded: computed from --seed, so runs are reproducible, but anyone who knows the
    seed can subtract the noise, so there is no privacy guarantee. secret: from the operating system's random numbers;
    the key (salt) is stored in your state directory, outside the run folder"""

    @property
    def is_secret(self) -> bool:
        return self.noise == "secret"


@dataclass(frozen=True)
class Evaluate(Section):
    """Evaluation of the models: how often, and whether also on each client's own examples."""

    every: Annotated[int, "[1, 1e9]"] = 1
    """number of rounds between two evaluations; the untrained model and the last model are always evaluated"""
    chunk: Annotated[int, "[1, 1e9]"] = 1000
    """batch size of evaluation. Numbers that validation_step logs are averaged over these batches, which is wrong for
    F1 or AUC: for such metrics set the size of the largest test set, or log torchmetrics objects"""
    clients: bool = False
    """evaluate the server model, and personalised models if the method has them, on each client's test examples (on its
    training examples if no client has a test set; metric names then contain train). Values per client go to
    clients.jsonl, means and spreads over clients to rounds.jsonl"""
    new_clients: Annotated[float, "[0, 0.9]"] = 0.0
    """share of the clients, drawn by the run's seed, that rounds, sharing and statistics leave out; after the last
    round, each of these clients tests the server model, adapts it and tests it again (metrics new/...)"""
    adapt_epochs: Annotated[int, "[0, 1e9]"] = 1
    """epochs for which a new client trains the received model on its examples, with the optimizer and learning rate of
    local training, but no schedule and no noise; 0: none. FedBABU and Per-FedAvg adapt the model by their own rule"""


@dataclass(frozen=True)
class Measure(Section):
    """Measurement of convergence parameters (heterogeneity, gradient noise, smoothness) at the server model."""

    every: Annotated[int, "[0, 1e9]"] = 10
    """number of rounds between two measurements of zeta^2 (heterogeneity of the clients), sigma^2 (gradient noise) and,
    with a pool of synthetic images, delta^2 (shift of the pool); 0: never"""
    samples: Annotated[int | None, "[16, 1e9]"] = None
    """number of examples per client on which the convergence parameters are estimated, with standard errors (null: all
    examples, so no standard errors)"""
    smoothness: bool = False
    """also measure smoothness constants of the loss: L_max (largest on a client's own data), L_p (largest on a client's
    own and shared data), L_pool (on the pool). The Lanczos iteration takes hundreds of passes over the data"""
    clients: bool = False
    """evaluate the server model on each client's training images, in the rounds of evaluate.every: values per client go
    to clients.jsonl, the worst value to rounds.jsonl. For test images or personalised models use evaluate.clients"""
    measure: str | None = None
    """import path of a user-defined measure, such as my_lab.py:Name, which computes numbers from the server model
    every measure.every rounds; null: none"""


SECTIONS = {
    "data": Data, "partition": Partition, "sharing": Sharing, "generator": Generator,
    "model": Model, "client": Client, "federation": Federation, "communication": Communication,
    "straggler": Straggler, "attack": Attack, "dp": DP, "evaluate": Evaluate, "measure": Measure, "tracking": Tracking,
}  # fmt: skip
