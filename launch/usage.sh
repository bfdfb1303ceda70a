# shellcheck shell=bash
# Sourced first by the scripts here: with --help or -h as the first argument, prints the comment at the script's head and
# ends, before anything is installed.
case "${1:-}" in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
