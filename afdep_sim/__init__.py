"""afdep_sim: one protocol text for Attention-FFN disaggregation, run on GPUs and in a discrete-event model."""

__version__ = "0.1.0"
