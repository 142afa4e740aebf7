-- Slot hosts. KEYS[1] is the registry's prefix; hash b: host id -> {last heartbeat (us), epoch, the host's own words}.

-- Payload: {host id, epoch, words}. A host whose epoch has been overtaken is told so.
local function beat(keys, args)
  local K, now, a = keys[1], now_us(), unpack_(args[4])
  since_start(now)
  local old = redis.call('HGET', K .. 'b', a[1])
  local epoch = old and unpack_(old)[2] or 0
  if epoch > a[2] then return { ERROR, pack({ 'overtaken', epoch }) } end
  redis.call('HSET', K .. 'b', a[1], pack({ now, a[2], a[3] }))
  -- A directory that lost its data counts on from the lives that are there: no epoch is given out twice.
  if tonumber(redis.call('HGET', K .. 'e', a[1]) or 0) < a[2] then redis.call('HSET', K .. 'e', a[1], a[2]) end
  return { OK, string.format('%.0f', now) }
end

-- After a restart every heartbeat looks old: with how long this server has answered, hosts get time to beat.
local function hosts(keys)
  local now = now_us()
  local up = since_start(now)
  return { OK, pack({ now, up, redis.call('HGETALL', keys[1] .. 'b') }) }
end

-- Payload: {host id, epoch}: leaves, unless another epoch of it is there by now.
local function leave_host(keys, args)
  local a = unpack_(args[4])
  local old = redis.call('HGET', keys[1] .. 'b', a[1])
  if old and unpack_(old)[2] == a[2] then redis.call('HDEL', keys[1] .. 'b', a[1]) end
  return { OK, '' }
end

-- Payload: microseconds of silence after which a host is forgotten. Returns the ids of those that were.
local function reap(keys, args)
  local K, now, limit = keys[1], now_us(), unpack_(args[4])
  local gone = {}
  if since_start(now) > limit then
    local flat = redis.call('HGETALL', K .. 'b')
    for j = 1, #flat, 2 do
      if now - unpack_(flat[j + 1])[1] > limit then gone[#gone + 1] = flat[j] end
    end
    many('HDEL', K .. 'b', gone)
  end
  return { OK, pack(gone) }
end

-- Payload: host id. Epochs begin at the clock: else a plane that lost its data, or another one whose hosts have the same
-- names, would give them out again, and an old reference would be taken for one of a slot that holds something else.
local function next_epoch(keys, args)
  local K, id = keys[1], unpack_(args[4])
  local epoch = math.max(tonumber(redis.call('HGET', K .. 'e', id) or '0') + 1, now_us())
  redis.call('HSET', K .. 'e', id, string.format('%.0f', epoch))
  return { OK, string.format('%.0f', epoch) }
end
