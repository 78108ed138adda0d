"""What stands under Table A.2."""

NOTES = (
    "Saved: 100 (1 - sent until the target with the pool / without it). > is a lower bound (without the pool the "
    "target was not reached), < an upper bound (with it); -: nothing can be said.",
    "Paper's formula: one client, as if C = 1: 2 Ms + 2 R Mc against 2 R0 Mc; Ms: its synthetic images, Mc: what it "
    "gets or sends in a round. All clients: 2 N Ms + 2 R C N Mc against 2 R0 C N Mc. MB: 10^6 bytes, all clients.",
)
ROUNDS_NOTES = (
    "Ms: 50000/N images of 3x32x32 bytes, each with a byte of label; Mc: VGG-11 in float32, with SCAFFOLD twice that, "
    "with FedPVR also the control variate of its three linear layers.",
    "The paper's formula stands in the paper's units, Ms in MB and Mc in MiB (37.2 MiB = 39.0 MB, printed as 37.2 MB). "
    "In one unit throughout, MB or MiB, the paper's rounds give less than 0.1 more: for C = 1 what the column of all "
    "clients says.",
    "Table A.2 prints Ms ten times too small for N = 40 and 100 (0.39 and 0.16 MB instead of 3.84 and 1.54), and some "
    "of its cells differ by up to 3 points from what the paper's own rounds give.",
)
SWEEP_NOTES = (
    "Sent until the target: once + (down + up) R / rounds played, as every round of a model-averaging method costs the "
    "same, stragglers aside; in the paper's formula once / N and (down + up) / (C N). Bytes: what the runs counted.",
    "Means over the seeds that both settings have; a seed that never reached the target counts with all rounds played.",
)
