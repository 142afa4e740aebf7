-- Nothing but registering works while the library is loaded: no pairs(), no calls.
-- Flags tell the server when it may run a function although it is out of memory: what writes nothing (no-writes), and what
-- gives memory back or keeps hosts and claims alive (allow-oom). Claims are among them: a full plane is emptied by those who
-- claim, train and pop, and a claim costs a hundred bytes a row, of rows that are there. register and publish have none:
-- they are refused. So has place, which a put asks before it moves any payload: it is refused where its publish would be.
-- None has allow-stale: what a replica without its primary says of claims and rows may be long untrue.
redis.register_function('register_@VERSION@', read(register))
redis.register_function{ function_name = 'describe_@VERSION@', callback = read(describe), flags = { 'no-writes' } }
redis.register_function{ function_name = 'drop_@VERSION@', callback = mutation(drop), flags = { 'allow-oom' } }
redis.register_function{ function_name = 'snapshot_@VERSION@', callback = read(snapshot), flags = { 'allow-oom' } }
redis.register_function{ function_name = 'restore_claims_@VERSION@', callback = mutation(restore_claims), flags = { 'allow-oom' } }
redis.register_function('place_@VERSION@', read(place))
redis.register_function('publish_@VERSION@', mutation(publish))
redis.register_function{ function_name = 'clear_@VERSION@', callback = mutation(clear), flags = { 'allow-oom' } }
redis.register_function{ function_name = 'resolve_@VERSION@', callback = resolve, flags = { 'allow-oom' } }
redis.register_function{ function_name = 'locate_@VERSION@', callback = read(locate), flags = { 'no-writes' } }
redis.register_function{ function_name = 'unmoved_@VERSION@', callback = read(unmoved), flags = { 'no-writes' } }
redis.register_function{ function_name = 'rows_@VERSION@', callback = read(rows), flags = { 'no-writes' } }
redis.register_function{ function_name = 'depth_@VERSION@', callback = read(depth), flags = { 'no-writes' } }
redis.register_function{ function_name = 'claim_@VERSION@', callback = claim, flags = { 'allow-oom' } }
redis.register_function{ function_name = 'release_@VERSION@', callback = mutation(release), flags = { 'allow-oom' } }
redis.register_function{ function_name = 'release_owner_@VERSION@', callback = mutation(release_owner), flags = { 'allow-oom' } }
redis.register_function{ function_name = 'abandon_@VERSION@', callback = abandon, flags = { 'allow-oom' } }
redis.register_function{ function_name = 'list_claims_@VERSION@', callback = read(list_claims), flags = { 'allow-oom' } }
redis.register_function{ function_name = 'consumed_@VERSION@', callback = read(consumed), flags = { 'allow-oom' } }
redis.register_function{ function_name = 'beat_@VERSION@', callback = beat, flags = { 'allow-oom' } }
redis.register_function{ function_name = 'hosts_@VERSION@', callback = hosts, flags = { 'no-writes' } }
redis.register_function{ function_name = 'leave_host_@VERSION@', callback = leave_host, flags = { 'allow-oom' } }
redis.register_function{ function_name = 'reap_@VERSION@', callback = reap, flags = { 'allow-oom' } }
redis.register_function{ function_name = 'next_epoch_@VERSION@', callback = next_epoch, flags = { 'allow-oom' } }
