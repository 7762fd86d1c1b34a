#!/usr/bin/env bash
# From nothing to a model that answers: makes a tiny Qwen3 with random weights, fine-tunes it on small sums with two
# processes (tensor parallelism), and asks it sums that it has not seen, before and after. No GPU is needed.
# Fails unless at most 20% of the answers are right before, and at least 90% after.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

data=scripts/quickstart
work=megatron_output/quickstart
rm -rf "$work"
mkdir -p "$work"

# Show a command and run it.
run() {
  printf '$ %s\n' "$*"
  env "$@"
}

ask() { # model, result file
  run swift infer --model "$1" --val_dataset $data/test.jsonl --result_path "$2" \
    --temperature 0 --max_new_tokens 8 --max_batch_size 100
}

say "1/4 Making a tiny Qwen3 checkpoint"
run python $data/make_model.py $work/model

say "2/4 Asking it 200 sums, before training"
ask $work/model $work/before.jsonl

say "3/4 Fine-tuning it on 4,000 other sums, with two processes"
run NPROC_PER_NODE=2 megatron sft \
  --model $work/model \
  --dataset $data/train.jsonl \
  --tensor_model_parallel_size 2 \
  --micro_batch_size 64 \
  --global_batch_size 64 \
  --train_iters 600 \
  --lr 1e-3 \
  --lr_warmup_fraction 0.05 \
  --max_length 64 \
  --dataloader_num_workers 0 \
  --logging_steps 20 \
  --output_dir $work
checkpoint=$(ls -td $work/v*/checkpoint-* | head -n 1)

say "4/4 Asking it the same 200 sums again"
ask "$checkpoint" $work/after.jsonl

python $data/report.py $work "$checkpoint"
