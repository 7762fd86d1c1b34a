"""Configs of verl, siiRL, Trinity-RFT, ROLL and Oumi, translated to the options of this project.

table.py has the kinds of rows, keys.py reads a config, translation.py collects the flags, one file per system has its
rows, its defaults and the arithmetic of its batches, run.py the commands `megatron run` and `megatron convert`.
"""
