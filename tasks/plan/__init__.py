"""`megatron plan`: layouts that fit, with their memory and expected speed, before a run and without a GPU."""
