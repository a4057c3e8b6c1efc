#!/bin/sh
# Replaces fdsl-bench in tests. Prints a row of the requested variant and sizes, and measures nothing.
rows=${0%/*}/../figures/synth.csv out=/dev/stdout
variant=naive res=512 vertices=1000 batch=32 revision=0123456789ab
while [ $# -gt 0 ]; do
    case $1 in
    --env) echo "host,revision" && echo "here,${STUB_REVISION-$revision}" && exit ;;
    --columns) exec "${0%/*}/../../../fdsl-bench" --columns --format csv ;;
    --list) echo "  gbase  available" && echo "  bat  available" && exit ;;
    --variant) variant=$2 ;;
    --res) res=$2 ;;
    --vertices) vertices=$2 ;;
    --batch) batch=$2 ;;
    --out) out=$2 ;;
    esac
    shift
done
case ",${STUB_FAILS-}," in *",$variant,"*) exit 4 ;; esac
case ",${STUB_HANGS-}," in *",$variant,"*) echo $$ >"$out.pid" && exec sleep 60 ;; esac
[ "$out" = /dev/stdout ] || [ ! -s "$out" ] || header=no
awk -F, -v OFS=, -v variant="${variant%%,*}" -v res="$res" -v vertices="$vertices" -v batch="$batch" -v header="${header-yes}" '
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; if (header == "yes") print; next }
    !done && $at["variant"] == variant { done = 1; $at["res"] = $at["out_res"] = res; $at["vertices"] = vertices
        $at["batch"] = $at["items"] = batch; print }' "$rows" >>"$out"
