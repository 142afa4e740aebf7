-- Claims. C holds {owner, task, fields, claimed_at, expires_at or false, rows that live, order}.
local C_OWNER, C_TASK, C_AT, C_EXPIRES, C_LIVE = 1, 2, 4, 5, 6

-- A claim has so many rows less; without any it has ended.
local function lose(K, claim, head, count)
  head[C_LIVE] = head[C_LIVE] - count
  if head[C_LIVE] > 0 then
    redis.call('HSET', K .. 'C', claim, pack(head))
    return
  end
  redis.call('HDEL', K .. 'C', claim)
  redis.call('HDEL', K .. 'R', claim)
  redis.call('ZREM', K .. 'L', claim)
end

-- Makes rows of a claim claimable again and remembers that the claim lost them.
local function unclaim(P, claim, head, rids)
  local K = P.K
  local blobs = load_rows(K, rids)
  local list, ids, groups, names = {}, {}, {}, {}
  for j, blob in ipairs(blobs) do
    list[j] = unpack_(blob)
    ids[j] = list[j][ID]
    names[j] = list[j][GROUP]
  end
  many('HDEL', K .. 'k:' .. head[C_TASK], rids)
  many('SADD', K .. 'l:' .. claim, ids)
  redis.call('EXPIRE', K .. 'l:' .. claim, KEEP_S)
  if P.gsize then load_groups(P, names, groups) end
  local only = {}
  for _, ix in ipairs(P.ix) do if ix[2] == head[C_TASK] then only[#only + 1] = ix end end
  touch(P, rids, list, names, {}, groups, only)
  lose(K, claim, head, #rids)
end

local function living(P, claim, head)
  local rids = split(redis.call('HGET', P.K .. 'R', claim))
  local held, out = hmget(P.K .. 'k:' .. head[C_TASK], rids), {}
  for j, rid in ipairs(rids) do if held[j] == claim then out[#out + 1] = rid end end
  return out
end

local function head_of(K, claim)
  local blob = redis.call('HGET', K .. 'C', claim)
  return blob and unpack_(blob)
end

-- Takes back claims whose lease is over.
local function expire(P)
  for _, claim in ipairs(redis.call('ZRANGEBYSCORE', P.K .. 'L', '-inf', P.now / 1000000)) do
    local head = head_of(P.K, claim)
    unclaim(P, claim, head, living(P, claim, head))
  end
end

local function batch(P, head, rids, blobs)
  return { OK, pack({ true, pack(head), rids, blobs or load_rows(P.K, rids), moved_at(P) }) }
end

-- How many of the rows that wait, of the oldest 1000, lack which field: {field number, count}.
local EXPLAINED = 1000
local function lacking(P, ix)
  local counts, out = {}, {}
  for _, blob in ipairs(load_rows(P.K, redis.call('ZRANGE', P.K .. 'w:' .. ix[1], 0, EXPLAINED - 1))) do
    local prod = unpack_(blob)[PROD]
    for _, f in ipairs(ix[3]) do if not prod[f] then counts[f] = (counts[f] or 0) + 1 end end
  end
  for f, n in pairs(counts) do out[#out + 1] = { f, n } end
  return out
end

local function unready(P, ix, ready, explain)
  local shown = redis.call('ZRANGE', P.K .. 'w:' .. ix[1], 0, 15)
  local oldest, ids = false, {}
  for j, blob in ipairs(load_rows(P.K, shown)) do
    local row = unpack_(blob)
    if j == 1 then oldest = P.now / 1000000 - row[CREATED] end
    ids[j] = row[ID]
  end
  local next_end = redis.call('ZRANGE', P.K .. 'L', 0, 0, 'WITHSCORES')
  local ends = next_end[2] and tonumber(next_end[2]) - P.now / 1000000 or false
  return { OK, pack({ false, ready, oldest, ids, ends, explain and lacking(P, ix) or {} }) }
end

local function group_names(members)
  local names = {}
  for j, member in ipairs(members) do names[j] = string.sub(member, WIDTH + 1) end
  return names
end

-- Takes the first ready units: `least` to `most` rows, or none; whole groups stay in the index. No group is larger than P.gsize,
-- nor that than `most`. Returns rids, members of the index where those are groups, and how many rows are ready.
local function take(P, ix, most, least)
  local q = P.K .. 'q:' .. ix[1]
  if not P.gsize then
    local got, ready = dequeue(q, most, least)
    return got, nil, ready
  end
  local rids, taken, full, from = {}, {}, false, 0
  while not full do
    local members = redis.call('ZRANGE', q, from, from + math.ceil((most - #rids) / P.gsize) - 1) -- some may be smaller
    if #members == 0 then break end
    from = from + #members
    for j, blob in ipairs(hmget(P.K .. 'g', group_names(members))) do
      local g = unpack_(blob)
      if #rids + fit_count(g) > most then full = true break end
      taken[#taken + 1] = members[j]
      for _, rid in ipairs(fit(g)) do rids[#rids + 1] = rid end
      if #rids == most then full = true break end
    end
  end
  if #rids > 0 and (#rids >= least or full) then return rids, taken end
  return nil, nil, #rids
end

-- Rows that are claimed leave the other indexes of their task.
local function leave_others(P, ix, rids, blobs, members)
  local list
  for _, other in ipairs(P.ix) do
    if other[2] == ix[2] and other ~= ix then
      local rem, waits = {}, rids
      if members then
        many('ZREM', P.K .. 'q:' .. other[1], members)
      else
        if not list then
          list = {}
          for j, blob in ipairs(blobs) do list[j] = unpack_(blob) end
        end
        waits = {}
        for j, rid in ipairs(rids) do
          local put = since(list[j], other[3])
          if put then note(rem, put, rid) else waits[#waits + 1] = rid end
        end
        enqueue(P.K .. 'q:' .. other[1], {}, rem)
      end
      many('ZREM', P.K .. 'w:' .. other[1], waits)
    end
  end
end

-- Payload: {task, fields, most, least, owner, lease in seconds or false, names of the fields, whether to explain}.
-- The op_id is the claim id: asked again, a claim that lives is the same batch, one that has ended is refused.
local function claim(keys, args)
  local K, id, now = keys[1], args[1], now_us()
  local P = open(K, now)
  local head = P and head_of(K, id)
  if head then return batch(P, head, living(P, id, head)) end
  if redis.call('EXISTS', K .. 'o:' .. id) == 1 then return { REFUSED, '' } end
  local left = (tonumber(args[2]) - now) / 1000000
  if left < 0 then return { LATE, '' } end
  if not P then return { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  local a = unpack_(args[4])
  local task, most, least, lease = a[1], a[3], a[4], a[6]
  expire(P)
  local ix = index(P, task, a[2])
  if ix[4] then return { INDEXING, '' } end
  local rids, members, ready = take(P, ix, most, least)
  if not rids then return unready(P, ix, ready, a[8]) end
  local at = now / 1000000
  head = { a[5], task, a[7], at, lease and at + lease, #rids, string.format('%.0f', P.seq) }
  redis.call('HSET', K .. 'C', id, pack(head))
  redis.call('HSET', K .. 'R', id, table.concat(rids))
  if lease then redis.call('ZADD', K .. 'L', at + lease, id) end
  local held = {}
  for j, rid in ipairs(rids) do held[2 * j - 1] = rid; held[2 * j] = id end
  held[#held + 1] = PAD; held[#held + 1] = ''
  many('HSET', K .. 'k:' .. task, held)
  local blobs = load_rows(K, rids)
  if members then many('ZREM', K .. 'q:' .. ix[1], members) end
  leave_others(P, ix, rids, blobs, members)
  redis.call('SET', K .. 'o:' .. id, 'c', 'EX', math.ceil(math.min(left, MOST_OP_S)) + KEEP_S)
  return batch(P, head, rids, blobs)
end

-- Payload: {task, ids, claim id per id}. All of them, or none.
local function release(K, P, args)
  if not P then return { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  local a = unpack_(args[4])
  local task, ids, claims = a[1], a[2], a[3]
  expire(P)
  local rids = hmget(K .. 'i', ids)
  local heads, by_claim, order, seen = {}, {}, {}, {}
  for j, rid in ipairs(rids) do
    local id = claims[j]
    if not heads[id] then
      heads[id] = head_of(K, id) or { '', -1 }
      by_claim[id] = {}
      order[#order + 1] = id
    end
    local held = rid and heads[id][C_TASK] == task and redis.call('HGET', K .. 'k:' .. task, rid)
    if held ~= id then return { ERROR, pack({ 'lost', j }) } end
    if not seen[rid] then table.insert(by_claim[id], rid) end
    seen[rid] = true
  end
  for _, id in ipairs(order) do unclaim(P, id, heads[id], by_claim[id]) end
  return { OK, '' }, true
end

-- Payload: owner.
local function release_owner(K, P, args)
  local owner, any = unpack_(args[4]), false
  local flat = P and redis.call('HGETALL', K .. 'C') or {}
  for j = 1, #flat, 2 do
    local head = unpack_(flat[j + 1])
    if head[C_OWNER] == owner then
      unclaim(P, flat[j], head, living(P, flat[j], head))
      any = true
    end
  end
  return { OK, '' }, any
end

-- ARGV[1] is the claim id.
local function abandon(keys, args)
  local K, id, now = keys[1], args[1], now_us()
  local P = open(K, now)
  local head = P and head_of(K, id)
  if head then
    unclaim(P, id, head, living(P, id, head))
    notify(K)
  end
  refuse(K, id)
  return { OK, '' }
end

-- Payload: {task, claims or false}. Which claims there are, or the rows of some of them.
local function list_claims(K, P, args)
  if not P then return { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  local a, out = unpack_(args[4]), {}
  expire(P)
  if a[2] then
    for j, id in ipairs(a[2]) do
      local head = head_of(K, id)
      out[j] = head and load_rows(K, living(P, id, head)) or {}
    end
    return { OK, pack(out) }
  end
  local flat = redis.call('HGETALL', K .. 'C')
  for j = 1, #flat, 2 do
    if unpack_(flat[j + 1])[C_TASK] == a[1] then out[#out + 1] = { flat[j], flat[j + 1] } end
  end
  return { OK, pack(out) }
end

-- Payload: tasks. Whether every sample is claimed by each of them: claimed rows that died are in no table.
local function consumed(K, P, args)
  if not P then return { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  expire(P)
  local rows = entries(K .. 'i')
  for _, task in ipairs(unpack_(args[4])) do
    if entries(K .. 'k:' .. task) ~= rows then return { OK, pack(false) } end
  end
  return { OK, pack(true) }
end
