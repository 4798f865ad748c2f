# MPICH waits forever for a process that ends before MPI has begun in it. One has ended if its proxy
# on this node has waited for a process: see proc(5), cminflt.
has_lost_rank() { # PARENT of the proxy
    local stat
    for proxy in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do
        read -ra stat 2>/dev/null <"/proc/$proxy/stat"
        [[ ${stat[1]-} == "(hydra_pmi_proxy)" ]] && ((stat[10])) && return
    done
    return 1
}
