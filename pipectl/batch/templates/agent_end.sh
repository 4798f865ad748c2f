code=$?
if ((code)) && [[ -e "$PIPECTL_RUN_DIRECTORY/starting" ]]; then # mpiexec would wait forever
    for signal in 0 0 TERM TERM KILL; do
        kill -s "$signal" "$PPID" 2>/dev/null || break
        sleep 1
    done
fi
exit "$code"
