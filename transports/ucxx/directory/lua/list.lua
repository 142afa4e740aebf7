-- Looking things up.

-- Payload: {ids, rid per id or false}. The cells of each row; where it is missing, or another incarnation, its rid or ''.
local function locate(K, P, args)
  if not P then return { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  local a = unpack_(args[4])
  local rids = hmget(K .. 'i', a[1])
  local ask, at = {}, {}
  for j, rid in ipairs(rids) do if rid then ask[#ask + 1] = rid; at[#at + 1] = j end end
  local cells = hmget(K .. 'c', ask)
  local out = {}
  for j = 1, #rids do out[j] = false; rids[j] = rids[j] or '' end
  for n, j in ipairs(at) do out[j] = cells[n] end
  return { OK, pack({ rids, out }) }
end

-- Payload: {limit} or {false, rids}. A partition of at most `limit` rows comes whole, of a larger one the rids only.
local function rows(K, P, args)
  if not P then return { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  local a = unpack_(args[4])
  local rids, groups = a[2], {}
  if not rids then
    rids, groups = redis.call('HKEYS', K .. 'r'), redis.call('HGETALL', K .. 'g')
    if #rids > a[1] then return { OK, pack({ rids, groups }) } end
  end
  return { OK, pack({ rids, groups, hmget(K .. 'r', rids), hmget(K .. 't', rids), hmget(K .. 'c', rids) }) }
end
