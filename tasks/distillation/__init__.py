"""Distillation: a student learns a teacher's distributions (`--rlhf_type gkd`)."""
