stop_s={{ job.resources.walltime - job.lead_time_s }}
wait_s=$((SECONDS < stop_s ? stop_s - SECONDS : 1))
(read -rt "$wait_s" <> <(:); kill -s USR2 $$) &
helpers+=("$!")
disown "$!"
