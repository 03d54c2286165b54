#!/usr/bin/env bash
# The figures of bench/results that a GPU gives, part after part:  bench/figures.sh GPUS PART...
#
#   on one GPU       wide wide_dense narrow long profile startup_widths startup
#                    width_good_1 width_good width_good_many width_good_256 width_good_long
#                    width_good_admission_64 like_for_like like_for_like_poor memory
#                    rows_bf16 rows_fp8 rows_alike rows_mixed rows_trees rows_penalised rows_trained
#                    pair proposals quantised long_context long_128k
#                    copy_kernels copy_block copy_edits copy_ordinary
#                    drafts_dspark drafts_domino drafts_kv drafts_dflash2_step drafts_rings
#                    house house_starts observe
#                    recurrent_9b recurrent_first_batches recurrent_27b_requests pd_decode pd_nixl mtp_step
#   on two, "0,1"    tp2 tp2_again dpa2 dpa2_recurrent tp2_rows
#
# GPUS as in CUDA_VISIBLE_DEVICES. Calls at once, each on a GPU of its own, do not disturb each other while processors
# are idle; where tests compiled kernels beside them, prefills took up to twice as long.
#
# From the environment: PAIR, a directory for random weights in Qwen3-8B's shapes, written if it is missing, as are
# PAIR-9b, PAIR-dspark and others for the parts that need them; LOGS; SECONDS_EACH, after which a part ends with
# what it has; SKIP, a directory: files named as results are left out; BEFORE, the other checkout of `house`,
# `rows_trained` and `drafts_dflash2_step`, a directory that its commit names; ADD=1: the rounds of `recurrent_9b` go
# to those that its result has.
set -u
cd "$(dirname "$0")/.."
gpus=$1; shift
pair=${PAIR:-/tmp/qwen3-8b-random} logs=${LOGS:-/tmp/figures} limit=${SECONDS_EACH:-1200} python=${PYTHON:-python3}
mkdir -p "$logs"
case " $* " in
  *" tp2 "* | *" tp2_again "* | *" dpa2 "* | *" dpa2_recurrent "* | *" tp2_rows "*) ;;
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
width() { # ACCEPTANCE ARGUMENTS...
  with_pair "width_$1" widths "--flags=$serving" --input 128 --mem-fraction 0.9 --acceptance "${1%%_*}" "${@:2}"
}

rows() { # NAME MORE_FLAGS ARGUMENTS...
  with_pair "rows_$1" widths "--flags=$serving$2" --mem-fraction 0.97 --acceptance recorded --seconds 3.5 "${@:3}"
}

alike() { # NAME ARGUMENTS...
  with_pair "$1" like_for_like "--flags=$serving" --input 128 --mem-fraction 0.97 "${@:2}"
}

paired() { # NAME MORE_FLAGS ARGUMENTS...
  with_pair "$1" paired --before "${BEFORE:?the other checkout}" "--flags=$serving$2" --mem-fraction 0.9 "${@:3}"
}

copies() { # NAME MORE_FLAGS ARGUMENTS...
  with_pair "copy_$1" copies "--flags=$serving 2048$2" --mem-fraction 0.9 "${@:3}"
}

own_pair() { # NAME MODULE DIRECTORY FLAGS ARGUMENTS...
  part "$1" "$2" --target "$3/target" --draft "$3/draft" "--dflash-flags=$draft" "--flags=$4" \
    --logs "$logs/$1" "${@:5}"
}

recurrent() { # NAME SHAPE MODULE FLAGS ARGUMENTS...
  weights "$pair-$2" "hybrid-$2"
  own_pair "recurrent_$1" "$3" "$pair-$2" "$4" "${@:5}"
}

drafts() { # HEAD BUILT_IN_FLAGS
  weights "$pair-$1" qwen3-8b --head "$1"
  own_pair "drafts_$1" widths "$pair-$1" "$serving" --input 128 --mem-fraction 0.9 --kinds ours built_in \
    "--built-in-flags=$2" --concurrency 64 1 --fixed --over-built-in 1=1.05 64=1.3
}

parallel() { # NAME PREFILL_GRAPHS ARGUMENTS...
  part "parallel_$1" parallel --layouts "${1%_again}" --gpus "$gpus" --logs "$logs/$1" \
    --flags="--enforce-disable-flashinfer-allreduce-fusion $2" "${@:3}"
}

for name in "$@"; do
  case $name in
    wide) step step_wide serve --kinds ours built_in --concurrency 32 1 --sampling greedy sampled \
      --bounds greedy:1=0.95 greedy:32=0.93 sampled:32=0.90 ;;
    wide_dense) step step_wide_dense serve --kinds ours built_in --rounds 5 --concurrency 1 32 \
      --variants "dense=--speculative-draft-model-quantization unquant" --sampling greedy sampled \
      --bounds greedy:1=0.95 greedy:32=0.93 sampled:32=0.90 ;;
    narrow) step step_narrow serve --kinds ours built_in --concurrency 64 128 --bound 0.75 --accept-length 3.2 \
      --max-tokens 120000 "--dflash-flags=$draft --speculative-num-draft-tokens 4" ;;
    long) step step_long serve --kinds ours built_in --concurrency 1 8 --input 16000 --output 256 \
      --max-tokens 140000 --bound 1.0 ;;
    profile) step step_profile step_profile --concurrency 1 32 --rounds 1 --token-map-size 32768 ;;
    startup_widths) DFLASH_SGLANG_CONFIG='{"width": {}}' step step_startup_widths startup --rounds 2 ;;
    startup) step step_startup startup --rounds 2 --sampling greedy ;;
    width_good) width good --concurrency 32 8 1 --moving 1 128 ;;
    width_good_1) width good_1 --concurrency 1 --moving 1 128 ;;
    width_good_many) width good_many --concurrency 128 64 ;;
    width_good_256) width good_256 --concurrency 256 --output 384 --rounds 2 ;;
    width_good_long) width good_long --kinds ours built_in --concurrency 64 128 --output 1536 --fixed 8 4 ;;
    # As SGLang serves DFLASH by itself: so many requests at most, admitted when four of them have ended.
    width_good_admission_64) width good_admission_64 --kinds ours built_in --concurrency 64 --fixed 8 4 \
      "--flags=$serving --min-free-slots-delay 4" ;;
    like_for_like) alike like_for_like --concurrency 8 1 32 64 128 --whole 32 64 128 \
      --seconds 1.6 2.5 1.5 1.5 1.5 --profile 8 --groups defaults dense fp8_target fp8 ;;
    like_for_like_poor) alike like_for_like_poor --acceptance poor --groups defaults --concurrency 64 256 \
      --output 384 --seconds 2 ;;
    memory) with_pair memory memory "--flags=--load-format dummy" ;;
    rows_bf16) rows bf16 "" --concurrency 128 64 32 8 1 --fixed 16 8 4 ;;
    rows_fp8) rows fp8 " --quantization fp8" --concurrency 128 64 32 8 1 --fixed 16 8 4 --alike ;;
    rows_alike) rows alike "" --kinds ours built_in --alike --concurrency 128 64 32 8 1 --fixed ;;
    rows_mixed) rows mixed "" --kinds ours --acceptance recorded_mixed --concurrency 64 --fixed 16 12 8 6 4 ;;
    rows_trees) rows trees "" --kinds ours built_in --concurrency 8 1 --fixed 16 --trees 16 32 64 --seconds 5 ;;
    rows_trained)
      part rows_trained paired --before "${BEFORE:?the other checkout}" --target dflash_sglang/pair/target \
        --draft dflash_sglang/pair/draft "--flags=--cuda-graph-bs-prefill 128 256 512 1024" --held-out --starts 0 \
        --mem-fraction 0.5 --concurrency 1 8 32 64 --input 600 --output 256 --seconds 5 --kept 1.0 --no-trees \
        --logs "$logs/rows_trained" ;;
    rows_penalised) rows penalised "" --kinds ours --concurrency 64 32 --fixed 16 8 6 4 --presence-penalty 1.5 ;;
    pair) part serve_pair pair ;;
    proposals) part proposals proposals ;;
    quantised) part wild_quantised quantised ;;
    long_context) part wild_long_context long_context ;;
    long_128k) with_pair long_128k long_128k "--flags=--load-format dummy" ;;
    copy_block) copies block "" --texts rewrite edits ;;
    copy_edits) copies edits "" --texts rewrite edits --copy 64 --concurrency 1 8 --seconds 4 ;;
    # Every prompt is prefilled as a whole: prefixes that happen to be there differ from round to round.
    copy_ordinary) copies ordinary " --disable-radix-cache" --texts code prose --copy 64 --output 1024 ;;
    copy_kernels) part copy_kernels copy_kernels ;;
    drafts_dspark) drafts dspark "--speculative-algorithm DSPARK" ;;
    drafts_domino) drafts domino "" ;;
    drafts_kv)
      weights "$pair-27b-sliding" hybrid-27b --window 2048
      own_pair drafts_kv draft_kv "$pair-27b-sliding" "--load-format dummy --mamba-full-memory-ratio 1.25" ;;
    drafts_dflash2_step)
      weights "$pair-dflash2" qwen3-8b --head dflash2
      own_pair drafts_dflash2_step serve "$pair-dflash2" "$steps" --kinds ours --rounds 5 --concurrency 32 1 \
        --variants "before=PYTHONPATH=${BEFORE:?the other checkout}:${PYTHONPATH:-} PYTHONSAFEPATH=1" \
        --variant-bound 1.005 ;;
    drafts_rings)
      weights "$pair-dflash2-sliding" qwen3-8b --head dflash2 --window 2048
      DFLASH_SGLANG_CONFIG='{"draft_kv": "auto"}' own_pair drafts_rings serve "$pair-dflash2-sliding" "$steps" \
        --kinds ours --rounds 5 --concurrency 32 1 --input 2500 --output 256 --max-tokens 100000 \
        --variants "whole=DFLASH_SGLANG_CONFIG='{\"width\": \"block\"}'" --variant-bound 1.005 ;;
    house) paired house "" ;;
    house_starts) paired house_starts "" --concurrency --requests 128 ;;
    observe)
      [ -e "$logs/unobserved" ] || "$python" -m bench.unobserved "$logs/unobserved"
      BEFORE=$logs/unobserved paired observe " --enable-metrics" --starts 0 --rounds 5 --concurrency 1 64 \
        --width 8 --kept 0.995 ;;
    recurrent_9b) recurrent 9b 9b recurrent "$serving" --rounds 1 ${ADD:+--add} ;;
    recurrent_first_batches) recurrent first_batches 9b first_batches "$serving" ;;
    recurrent_27b_requests) recurrent 27b_requests 27b running_requests "--load-format dummy" ;;
    mtp_step) part mtp_step mtp_step --target "$pair-step3p5" --draft "$pair-step3p5" --logs "$logs/mtp_step" \
      "--flags=$steps" --mem-fraction 0.8 --output 384 ;;
    pd_decode) step pd_decode disaggregated --concurrency 1 8 32 ;;
    pd_nixl) step pd_nixl transfers --mem-fraction 0.85 --max-tokens 40000 --input 1024 4096 --concurrency 1 8 ;;
    tp2) parallel tp2 --cuda-graph-backend-prefill=disabled --concurrency 32 1 16 64 ;;
    tp2_again) parallel tp2_again --cuda-graph-backend-prefill=disabled --concurrency 32 16 ;;
    dpa2) parallel dpa2 "--cuda-graph-bs-prefill 256 512 1024 2048 4096" --concurrency 16 1 64 \
      --also 16:1021 --profile 16 ;;
    dpa2_recurrent) parallel dpa2_recurrent "--cuda-graph-bs-prefill 256 512 1024 2048" --concurrency 16 1 64 ;;
    tp2_rows) with_pair parallel_tp2_rows widths "--flags=$serving --tp-size 2" --gpus "$gpus" --kinds ours \
      --mem-fraction 0.85 --acceptance recorded --concurrency 32 8 --fixed 16 8 6 4 --seconds 3.5 ;;
    *) echo "$name: no such part" >&2; exit 2 ;;
  esac
done
