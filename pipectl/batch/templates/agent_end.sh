code=$?
# Before MPI has begun, mpiexec would wait forever. (The daemons of Open MPI leave their agent.)
if [[ -e "$PIPECTL_START/starting" ]] && { ((code)) || [[ $* == *hydra_pmi_proxy* ]]; }; then
    ((code)) || echo "a process ended${where-} before MPI had begun in it" >&2
    for signal in 0 0 TERM TERM KILL; do
        kill -s "$signal" "$PPID" 2>/dev/null || break
        sleep 1
    done
fi
exit "$code"
