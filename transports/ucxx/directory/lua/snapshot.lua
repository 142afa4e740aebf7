-- What checkpoints need: a partition at one moment, and claims that are made again.

-- The partition as `describe` and `rows` show it, and its claims: {head, rids, seconds until the lease ends or false}.
local function snapshot(K, P, args)
  if not P then return { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  expire(P)
  local claims = {}
  local flat = redis.call('HGETALL', K .. 'C')
  for j = 1, #flat, 2 do
    local head = unpack_(flat[j + 1])
    local left = head[C_EXPIRES] and head[C_EXPIRES] - P.now / 1000000
    claims[#claims + 1] = { flat[j + 1], living(P, flat[j], head), left or false }
  end
  local about = describe(K, P)[2]
  return { OK, pack({ about, every_row(K), claims }) }
end

-- Payload: {schema or false, group size, number of tasks, {owner, task, names of the fields, claimed at, lease in seconds or
-- false, rids, ids} of each claim}. The schema is P's with more tasks. All claims are made, or none.
local function restore_claims(K, P, args)
  if not P then return { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  local a = unpack_(args[4])
  expire(P)
  local loaded, seen = {}, {}
  for i, c in ipairs(a[4]) do
    local rids, held = hmget(K .. 'i', c[7]), hmget(K .. 'k:' .. c[2], c[6])
    for j, rid in ipairs(c[6]) do
      if rids[j] ~= rid then return { ERROR, pack({ 'stale', i, j }) } end
      local name = c[2] .. ' ' .. rid
      if held[j] or seen[name] then return { ERROR, pack({ 'claimed', i, j }) } end
      seen[name] = true
    end
    loaded[i] = load_rows(K, c[6])
  end
  if a[1] then set_schema(P, a[1], a[2], a[3]) end
  for i, c in ipairs(a[4]) do
    local id, task, rids, held = args[1] .. '.' .. i, c[2], c[6], {}
    local ends = c[5] and P.now / 1000000 + c[5]
    redis.call('HSET', K .. 'C', id, pack({ c[1], task, c[3], c[4], ends, #rids, string.format('%.0f', P.seq) }))
    redis.call('HSET', K .. 'R', id, table.concat(rids))
    if ends then redis.call('ZADD', K .. 'L', ends, id) end
    for j, rid in ipairs(rids) do held[2 * j - 1] = rid; held[2 * j] = id end
    held[#held + 1] = PAD; held[#held + 1] = ''
    many('HSET', K .. 'k:' .. task, held)
    local list, groups, names, only = {}, {}, {}, {}
    for j, blob in ipairs(loaded[i]) do list[j] = unpack_(blob); names[j] = list[j][GROUP] end
    if P.gsize then load_groups(P, names, groups) end
    for _, ix in ipairs(P.ix) do if ix[2] == task then only[#only + 1] = ix end end
    touch(P, rids, list, names, {}, groups, only, not P.gsize and ready_since(P, list))
  end
  save(P)
  return { OK, '' }, true
end
