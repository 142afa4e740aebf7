-- Looking things up.

-- Payload: {ids}. The rid of each, '' where it is missing, and the rows.
local function locate(K, P, args)
  if not P then return { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  local a = unpack_(args[4])
  local rids = hmget(K .. 'i', a[1])
  local ask, at = {}, {}
  for j, rid in ipairs(rids) do if rid then ask[#ask + 1] = rid; at[#at + 1] = j end end
  local blobs, out = load_rows(K, ask), {}
  for j = 1, #rids do out[j] = false; rids[j] = rids[j] or '' end
  for n, j in ipairs(at) do out[j] = blobs[n] end
  return { OK, pack({ rids, out }) }
end

-- Payload: `moved_at` of an answer that said where rows lie. Whether they, and all their fields, lie there still.
local function unmoved(K, P, args)
  return { OK, P and P.ver == args[3] and moved_at(P) == args[4] and '1' or '' }
end

-- Payload: limit. What tells a scan of the partition that it was whole: when it was made, how many rows have gone, the last
-- incarnation; and of a partition of at most `limit` rows groups and rows.
local function rows(K, P, args)
  if not P then return { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  local seen = { redis.call('HGET', K .. 'p', 'born'), P.gone, digits(P.inc) }
  if entries(K .. 'i') > unpack_(args[4]) then return { OK, pack({ seen }) } end
  return { OK, pack({ seen, redis.call('HGETALL', K .. 'g'), every_row(K) }) }
end

-- How many groups are complete, by the homes of their rows.
local function depth(K, P, args)
  if not P then return { UNKNOWN, '' } end
  return { OK, pack(redis.call('HGETALL', K .. 'd')) }
end
