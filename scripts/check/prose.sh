#!/usr/bin/env bash
# Finds phrases in code, docs and scripts that have to be read twice. scripts/check/lint.sh calls this script.
#
#   scripts/check/prose.sh [FILE...]     by default, the text files that git tracks, except data and results
#
# Prints FILE:LINE:PHRASE and a better way to say it. Exit status 1 if it finds a phrase.
set -uo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.." || exit

units="(^|[^a-zA-Z'])([µmn]?s|us|seconds?|bytes?|[KMG]i?B|J)"
things='(image|sample|batch|step|run|layer|row|epoch|kernel|thread|rank|variant|shard|file|second|class|pixel|channel|block|line|value|option|vertex|orbit|figure|page)'
patterns=(
    "$units an? $things=µs per image, not µs an image"
    "\\b(a|one) (row|kernel|thread|file|line|column|value|byte|flag|text|block|word|stream|launch) an? $things\\b=one row per variant, not a row a variant"
    "one (behind|after) the other=consecutively"
    "\\bmeanwhile\\b=say when: while X runs"
    "\\bhonest(ly)?\\b|\\btruly\\b=say what is done"
    "\\blikewise\\b=repeat the noun: each comment stands alone"
    "\\blies behind\\b|\\bstands? behind\\b=follows, is stored after"
    "\\bheld against\\b=compared with"
    "\\b(is|are) told( of)?\\b=reports"
    "\\bgoes? on behind\\b=continues after"
    "\\bby heart\\b=remember"
    "\\bbehind the (last|latest|first)\\b=after the last"
    "\\bwho comes then\\b|\\bnobody waits\\b=name the subject"
    "\\bso many (samples|bytes|images|threads|ranks|steps|rows)\\b=that many"
    "\\ba wall of\\b|\\bthe wall of\\b=bound, limit"
)
if (($# == 0)); then
    mapfile -t files < <(git ls-files | grep -vE '^(results/|tests/data/|tests/fuzz/[a-z]+/|scripts/check/prose\.sh|tests/mutations\.txt|LICENSE)|\.(png|gz|csv|json|npy|tar)$')
    set -- "${files[@]}"
fi
found=0
for entry in "${patterns[@]}"; do
    if hits=$(grep -nEio -- "${entry%=*}" "$@" /dev/null); then
        printf '%s\n' "$hits" | sed "s|$| -> ${entry##*=}|"
        found=1
    fi
done
exit $found
