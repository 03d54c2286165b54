#!/usr/bin/env bash
# The figures of bench/results that a GPU gives, part after part:  bench/figures.sh GPUS PART...
#
#   on one GPU       wide narrow long profile startup_widths like_for_like like_for_like_poor
#                    rows_bf16 rows_fp8 rows_alike rows_mixed rows_trees rows_penalised rows_trained
#                    copy_edits copy_ordinary drafts_dspark drafts_domino house recurrent_9b pd_decode real_pair
#                    prefill_graphs
#   on two, "0,1"    tp2 dpa2 dpa2_recurrent tp2_rows
#
# GPUS as in CUDA_VISIBLE_DEVICES. Calls at once, each on a GPU of its own, do not disturb each other while processors
# are idle; where tests compiled kernels beside them, prefills took up to twice as long.
#
# From the environment: PAIR, a directory for random weights in Qwen3-8B's shapes, written if it is missing, as are
# PAIR-9b, PAIR-dspark and others for the parts that need them; LOGS; SECONDS_EACH, after which a part ends with
# what it has; SKIP, a directory: files named as results are left out; BEFORE, the other checkout of `house` and
# `rows_trained`, a directory that its commit names; ADD=1: the rounds of `recurrent_9b` go to those that its result
# has; PROMPTS, the directory with the prompts of `real_pair` and `prefill_graphs`.
set -u
cd "$(dirname "$0")/.."
gpus=$1; shift
pair=${PAIR:-/tmp/qwen3-8b-random} logs=${LOGS:-/tmp/figures} limit=${SECONDS_EACH:-1200} python=${PYTHON:-python3}
mkdir -p "$logs"
case " $* " in
  *" tp2 "* | *" dpa2 "* | *" dpa2_recurrent "* | *" tp2_rows "*) ;;
  *) export CUDA_VISIBLE_DEVICES=$gpus ;;
esac
draft="--speculative-draft-load-format auto"
models=(--target "$pair/target" --draft "$pair/draft" "--dflash-flags=$draft")

part() { # NAME MODULE ARGUMENTS...
  local name=$1 module=$2
  shift 2
  [ -e "${SKIP:-/nonexistent}/$name" ] && return
  echo "[$(date +%T)] $name"
  timeout -s TERM "$limit" "$python" -m "bench.$module" "$@" --out "bench/results/$name.json" \
    >"$logs/$name.log" 2>&1
  local status=$?
  echo "[$(date +%T)] $name ended with $status"
}

weights() { # DIRECTORY SHAPE ARGUMENTS...
  [ -e "$1/target" ] || "$python" -m dflash_sglang.bench.random_pair "$1" --shape "$2" --config-only "${@:3}"
}

with_pair() { # NAME MODULE ARGUMENTS...
  weights "$pair" qwen3-8b
  part "$1" "$2" "${models[@]}" --logs "$logs/$1" "${@:3}"
}

steps="--load-format dummy --cuda-graph-backend-prefill=disabled"
step() { # NAME MODULE ARGUMENTS...
  with_pair "$1" "$2" "--flags=$steps" "${@:3}"
}

serving="--load-format dummy --cuda-graph-bs-prefill 128 256 512 1024"
rows() { # NAME MORE_FLAGS ARGUMENTS...
  with_pair "rows_$1" widths "--flags=$serving$2" --mem-fraction 0.97 --acceptance recorded --seconds 3.5 "${@:3}"
}

alike() { # NAME ARGUMENTS...
  with_pair "$1" like_for_like "--flags=$serving" --input 128 --mem-fraction 0.97 "${@:2}"
}

copies() { # NAME MORE_FLAGS ARGUMENTS...
  with_pair "copy_$1" copies "--flags=$serving 2048$2" --mem-fraction 0.9 "${@:3}"
}

own_pair() { # NAME MODULE DIRECTORY FLAGS ARGUMENTS...
  part "$1" "$2" --target "$3/target" --draft "$3/draft" "--dflash-flags=$draft" "--flags=$4" \
    --logs "$logs/$1" "${@:5}"
}

drafts() { # HEAD BUILT_IN_FLAGS
  weights "$pair-$1" qwen3-8b --head "$1"
  own_pair "drafts_$1" widths "$pair-$1" "$serving" --input 128 --mem-fraction 0.9 --kinds ours built_in \
    "--built-in-flags=$2" --concurrency 64 1 --fixed --over-built-in 1=1.05 64=1.3
}

parallel() { # NAME PREFILL_GRAPHS ARGUMENTS...
  part "parallel_$1" parallel --layouts "$1" --gpus "$gpus" --logs "$logs/$1" \
    --flags="--enforce-disable-flashinfer-allreduce-fusion $2" "${@:3}"
}

for name in "$@"; do
  case $name in
    wide) step step_wide serve --kinds ours built_in --concurrency 32 1 --sampling greedy sampled \
      --bounds greedy:1=0.95 greedy:32=0.93 sampled:32=0.90 ;;
    narrow) step step_narrow serve --kinds ours built_in --concurrency 64 128 --bound 0.75 --accept-length 3.2 \
      --max-tokens 120000 "--dflash-flags=$draft --speculative-num-draft-tokens 4" ;;
    long) step step_long serve --kinds ours built_in --concurrency 1 8 --input 16000 --output 256 \
      --max-tokens 140000 --bound 1.0 ;;
    profile) step step_profile step_profile --concurrency 1 32 --rounds 1 --token-map-size 32768 ;;
    startup_widths) DFLASH_SGLANG_CONFIG='{"width": {}}' step step_startup_widths startup --rounds 2 ;;
    like_for_like) alike like_for_like --concurrency 8 1 32 64 128 --whole 32 64 128 \
      --seconds 1.6 2.5 1.5 1.5 1.5 --profile 8 --groups defaults dense fp8_target fp8 ;;
    like_for_like_poor) alike like_for_like_poor --acceptance poor --groups defaults --concurrency 64 256 \
      --output 384 --seconds 2 ;;
    rows_bf16) rows bf16 "" --concurrency 128 64 32 8 1 --fixed 16 8 4 ;;
    rows_fp8) rows fp8 " --quantization fp8" --concurrency 128 64 32 8 1 --fixed 16 8 4 --alike ;;
    rows_alike) rows alike "" --kinds ours built_in --alike --concurrency 128 64 32 8 1 --fixed ;;
    rows_mixed) rows mixed "" --kinds ours --acceptance recorded_mixed --concurrency 64 --fixed 16 12 8 6 4 ;;
    rows_trees) rows trees "" --kinds ours built_in --concurrency 8 1 --fixed 16 --trees 16 32 64 --seconds 5 ;;
    rows_trained)
      part rows_trained paired --before "${BEFORE:?the other checkout}" --target training/pair/target \
        --draft training/pair/draft "--flags=--cuda-graph-bs-prefill 128 256 512 1024" --held-out --starts 0 \
        --mem-fraction 0.5 --concurrency 1 8 32 64 --input 600 --output 256 --seconds 5 --kept 1.0 --no-trees \
        --logs "$logs/rows_trained" ;;
    rows_penalised) rows penalised "" --kinds ours --concurrency 64 32 --fixed 16 8 6 4 --presence-penalty 1.5 ;;
    copy_edits) copies edits "" --texts rewrite edits --copy 64 --concurrency 1 8 --seconds 4 ;;
    # Every prompt is prefilled as a whole: prefixes that happen to be there differ from round to round.
    copy_ordinary) copies ordinary " --disable-radix-cache" --texts code prose --copy 64 --output 1024 ;;
    drafts_dspark) drafts dspark "--speculative-algorithm DSPARK" ;;
    drafts_domino) drafts domino "" ;;
    house) with_pair house paired --before "${BEFORE:?the other checkout}" "--flags=$serving" --mem-fraction 0.9 ;;
    recurrent_9b)
      weights "$pair-9b" hybrid-9b
      own_pair recurrent_9b recurrent "$pair-9b" "$serving" --rounds 1 ${ADD:+--add} ;;
    real_pair)
      sets="${PROMPTS:?their directory}"
      part real_pair real_pair --prompts "$sets/gsm8k.jsonl" "$sets/humaneval.jsonl" "$sets/mtbench.jsonl" \
        --concurrency 64 32 8 1 --output 256 --together ;;
    prefill_graphs)
      sets="${PROMPTS:?their directory}"
      part prefill_graphs real_pair --prompts "$sets/gsm8k.jsonl" "$sets/mtbench.jsonl" "$sets/humaneval.jsonl" \
        --concurrency 32 64 8 1 --output 256 --together ;;
    pd_decode) step pd_decode disaggregated --concurrency 1 8 32 ;;
    tp2) parallel tp2 --cuda-graph-backend-prefill=disabled --concurrency 32 1 16 64 ;;
    dpa2) parallel dpa2 "--cuda-graph-bs-prefill 256 512 1024 2048 4096" --concurrency 16 1 64 \
      --also 16:1021 --profile 16 ;;
    dpa2_recurrent) parallel dpa2_recurrent "--cuda-graph-bs-prefill 256 512 1024 2048" --concurrency 16 1 64 ;;
    tp2_rows) with_pair parallel_tp2_rows widths "--flags=$serving --tp-size 2" --gpus "$gpus" --kinds ours \
      --mem-fraction 0.85 --acceptance recorded --concurrency 32 8 --fixed 16 8 6 4 --seconds 3.5 ;;
    *) echo "$name: no such part" >&2; exit 2 ;;
  esac
done
